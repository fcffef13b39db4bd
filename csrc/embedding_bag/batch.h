// A batch of bags as the caller gave it, checked, and how it is pooled and judged.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <iterator>
#include <optional>
#include <vector>

#include "embedding_bag/rows.h"

namespace holdfast {

struct Batch {
  RowTable table;
  Pooling pooling;
  std::vector<int64_t> bounds;
  at::Tensor indices, weights;  // what pooling points into
  int64_t bags() const { return static_cast<int64_t>(bounds.size()) - 1; }
  int64_t index(int64_t i) const {
    return pooling.wide ? static_cast<const int64_t*>(pooling.indices)[i]
                        : int64_t{static_cast<const int32_t*>(pooling.indices)[i]};
  }
};

// Throws if the arguments are invalid; the indices are checked where they are read.
Batch batch_of(
    const RowTable& table, const at::Tensor& indices, const std::optional<at::Tensor>& offsets,
    const std::optional<at::Tensor>& weights, bool include_last, int64_t padding, bool mean,
    bool check, bool prefetch);
[[noreturn]] void refuse_index(const Batch& b, int64_t position);

// best: FBGEMM's where it serves, else ours; portable: ours without SIMD; ours: with it; fbgemm: on
// rows that need carry no checksums, unchecked. All round alike.
enum class Kernel : int { best, portable, ours, fbgemm };

// By Kernel (embedding_bag/op.py, KERNELS).
constexpr const char* kKernels[] = {"best", "portable", "ours", "fbgemm"};
static_assert(std::size(kKernels) == static_cast<int>(Kernel::fbgemm) + 1);

// FBGEMM's own kernel, of u8 and u4 tables, found once for many calls: offsets, bags, indices to
// prefetch, output; false if an index names no row, or the bags have other than those indices.
using FbgemmPool = std::function<bool(const int64_t*, int64_t, int64_t, float*)>;
bool fbgemm_available();
FbgemmPool fbgemm_pool(const RowTable& table, const Pooling& pooling);

bool served_by_fbgemm(const Batch& b, bool half);
int64_t grain(const Batch& b);  // bags a thread takes at once

// Called with all sums, fp32 [bags, dim], between the pooling and the look at them.
using Site = std::function<void(const at::Tensor&)>;

struct Pooled {
  at::Tensor output;
  std::vector<int64_t> suspects;  // bags
  int64_t dismissed = 0;  // those that a second opinion cleared
};
Pooled run(const Batch& b, Kernel kernel, bool half, const Site& site);

}  // namespace holdfast
