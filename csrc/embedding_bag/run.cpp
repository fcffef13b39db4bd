// Pools bags on all threads, and checks each bag while its rows are in the cache.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <mutex>

#include "core/instruction_sets.h"
#include "embedding_bag/batch.h"

namespace holdfast {

namespace {

const BagKernels& kernels_of(Kernel kernel) {
  return kernel == Kernel::portable ? bag_kernels_default : bag_kernels();
}

constexpr int64_t kGroupBytes = 20 << 10;  // so many stay in the cache until their check

int64_t bytes(const Batch& b, int64_t from, int64_t to) {
  return (b.bounds[to] - b.bounds[from]) * b.table.stride;
}

template <typename Index>
bool any_outside(const Batch& b, int64_t begin, int64_t end) {
  const auto* indices = static_cast<const Index*>(b.pooling.indices);
  const auto rows = static_cast<uint64_t>(b.table.rows);
  bool outside = false;
  for (int64_t i = begin; i < end; ++i) {
    outside |= static_cast<uint64_t>(int64_t{indices[i]}) >= rows;
  }
  return outside;
}

void check_indices(const Batch& b, int64_t begin, int64_t end) {
  const bool wide = b.pooling.wide;
  if (!(wide ? any_outside<int64_t>(b, begin, end) : any_outside<int32_t>(b, begin, end))) return;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t index = b.index(i);
    if (index < 0 || index >= b.table.rows) refuse_index(b, i);
  }
}

// Compares bit for bit, except that all NaN are equal: their sign and payload depend on the order
// of operands.
bool alike(float a, float b) {
  return std::memcmp(&a, &b, sizeof a) == 0 || (std::isnan(a) && std::isnan(b));
}

// Pools and checks ranges of bags.
class Worker {
 public:
  Worker(const Batch& batch, Kernel kernel, bool half)
      : batch_(batch),
        with_(kernels_of(kernel)),
        fbgemm_(
            kernel == Kernel::best && served_by_fbgemm(batch, half)
                ? fbgemm_pool(batch.table, batch.pooling)
                : nullptr) {}

  // Pools bags from `from` to `to` into `sums` [to - from, dim] and computes their checksums in
  // `expected`. This thread continues up to bag `last`.
  void pool(int64_t from, int64_t to, int64_t last, float* sums, Expected* expected) const {
    const RowTable& t = batch_.table;
    if (fbgemm_) pool_by_fbgemm(from, to, last, sums);
    for (int64_t bag = from; bag < to; ++bag, sums += t.dim, ++expected) {
      const int64_t begin = batch_.bounds[bag], end = batch_.bounds[bag + 1];
      if (!fbgemm_)
        with_.pool(t, batch_.pooling, begin, end, sums, *expected);
      else if (batch_.pooling.check) {
        with_.expect(t, batch_.pooling, begin, end, sums, *expected);
      }
      if (expected->outside >= 0) refuse_index(batch_, expected->outside);
    }
  }

  bool good(int64_t bag, const float* sums, const Expected& expected) const {
    const float* signs = batch_.table.signs.values;
    if (!batch_.pooling.check) return true;
    if (agrees(expected, with_.signed_sum(sums, batch_.table.dim, signs))) return true;
    return expected.guarded && cleared(bag, sums);
  }

  int64_t dismissed() const { return dismissed_; }

  bool store_half(const float* sums, uint16_t* to) const {
    return with_.to_half(sums, to, batch_.table.dim);
  }

  // Returns the end of the group of bags from `from` on whose rows fit the cache together.
  int64_t group(int64_t from, int64_t to) const {
    if (!fbgemm_) return from + 1;
    int64_t end = from + 1;
    while (end < to && bytes(batch_, from, end + 1) <= kGroupBytes) ++end;
    return end;
  }

 private:
  // FBGEMM prefetches up to the last index that it is given. It is given the thread's last index,
  // not the group's, so that prefetching does not stop at each group. It then reports the remaining
  // indices as an error, like an index out of range, so that the indices are checked here.
  void pool_by_fbgemm(int64_t from, int64_t to, int64_t last, float* sums) const {
    const int64_t* bounds = batch_.bounds.data();
    const bool ahead = batch_.pooling.prefetch && bounds[last] > bounds[to];
    const int64_t told = bounds[ahead ? last : to] - bounds[from];
    if (fbgemm_(bounds + from, to - from, told, sums)) return;
    check_indices(batch_, bounds[from], bounds[to]);
    TORCH_CHECK(ahead, "FBGEMM refused bags ", from, " to ", to);
  }

  // Returns true if every row is intact and another kernel computes the same bits. The suspicion is
  // then due to rounding errors, which add up if all rows are alike.
  bool cleared(int64_t bag, const float* sums) const {
    const RowTable& t = batch_.table;
    const int64_t begin = batch_.bounds[bag], end = batch_.bounds[bag + 1];
    for (int64_t i = begin; i < end; ++i) {
      if (!intact(t, batch_.index(i))) return false;
    }
    const bool portable = !fbgemm_ && &with_ != &bag_kernels_default;
    const BagKernels& other = portable ? bag_kernels_default : bag_kernels();
    std::vector<float> again(static_cast<size_t>(t.dim));
    Expected unused;
    other.pool(t, batch_.pooling, begin, end, again.data(), unused);
    const bool same = std::equal(again.begin(), again.end(), sums, alike);
    if (same) ++dismissed_;
    return same;
  }

  const Batch& batch_;
  const BagKernels& with_;
  FbgemmPool fbgemm_;  // empty if our kernel is used
  mutable std::atomic<int64_t> dismissed_{0};
};

}  // namespace

const BagKernels& bag_kernels() {
  static const BagKernels& chosen = beside_reductions<BagKernels>({HOLDFAST_SETS(bag_kernels)});
  return chosen;
}

// FBGEMM has no padding index, rounds to fp16 before a check, and sums one column in another order.
bool served_by_fbgemm(const Batch& b, bool half) {
  return fbgemm_available() && quantised(b.table.kind) && b.pooling.padding < 0 && !half &&
      b.table.dim > 1;
}

int64_t grain(const Batch& b) {
  return std::max<int64_t>(1, b.bags() * 8192 / (bytes(b, 0, b.bags()) + 1));
}

Pooled run(const Batch& b, Kernel kernel, bool half, const Site& site) {
  const int64_t dim = b.table.dim, bags = b.bags();
  const at::Tensor sums = at::empty({bags, dim}, at::kFloat);
  const at::Tensor output = half ? at::empty({bags, dim}, at::kHalf) : sums;
  float* all = sums.data_ptr<float>();
  const Worker worker(b, kernel, half);
  std::vector<Expected> expected(static_cast<size_t>(bags));
  std::vector<int64_t> suspects;
  std::mutex mutex;
  const auto judge = [&](int64_t bag) {
    const float* of_bag = all + bag * dim;
    bool good = worker.good(bag, of_bag, expected[static_cast<size_t>(bag)]);
    if (half) {
      auto* to = static_cast<uint16_t*>(output.data_ptr()) + bag * dim;
      good &= worker.store_half(of_bag, to) | !b.pooling.check;
    }
    if (good) return;
    const std::lock_guard<std::mutex> lock(mutex);
    suspects.push_back(bag);
  };
  at::parallel_for(0, bags, grain(b), [&](int64_t from, int64_t to) {
    for (int64_t end; from < to; from = end) {
      end = worker.group(from, to);
      worker.pool(from, end, to, all + from * dim, expected.data() + from);
      for (int64_t bag = from; bag < end && !site; ++bag) judge(bag);
    }
  });
  if (site) {
    site(sums);
    for (int64_t bag = 0; bag < bags; ++bag) judge(bag);
  }
  std::sort(suspects.begin(), suspects.end());
  return {output, suspects, worker.dismissed()};
}

}  // namespace holdfast
