// A checked batch of bags, and the functions that pool it and check the sums.
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
  at::Tensor indices, weights;  // These own the memory that `pooling` points into.
  int64_t bags() const { return static_cast<int64_t>(bounds.size()) - 1; }
  int64_t index(int64_t i) const {
    return pooling.wide ? static_cast<const int64_t*>(pooling.indices)[i]
                        : int64_t{static_cast<const int32_t*>(pooling.indices)[i]};
  }
};

// Throws if the arguments are invalid. The values of the indices are checked where they are read.
Batch batch_of(
    const RowTable& table, const at::Tensor& indices, const std::optional<at::Tensor>& offsets,
    const std::optional<at::Tensor>& weights, bool include_last, int64_t padding, bool mean,
    bool check, bool prefetch);
[[noreturn]] void refuse_index(const Batch& b, int64_t position);

// `best` is FBGEMM's kernel where it can be used, and else ours. `portable` is ours without SIMD,
// and `ours` with it. `fbgemm` is FBGEMM's, unchecked, on rows that may lack checksums. All of them
// round alike.
enum class Kernel : int { best, portable, ours, fbgemm };

// The names in the order of Kernel (KERNELS of embedding_bag/op.py in Python).
constexpr const char* kKernels[] = {"best", "portable", "ours", "fbgemm"};
static_assert(std::size(kKernels) == static_cast<int>(Kernel::fbgemm) + 1);

// FBGEMM's own kernel for u8 and u4 tables, which is made once for many calls. It takes offsets,
// the number of bags, the number of indices to prefetch, and the output. It returns false if an
// index names no row, or if the bags have another number of indices.
using FbgemmPool = std::function<bool(const int64_t*, int64_t, int64_t, float*)>;
bool fbgemm_available();
FbgemmPool fbgemm_pool(const RowTable& table, const Pooling& pooling);

bool served_by_fbgemm(const Batch& b, bool half);
int64_t grain(const Batch& b);  // How many bags a thread takes at once.

// Called with all sums, fp32 [bags, dim], after they were pooled and before they are checked.
using Site = std::function<void(const at::Tensor&)>;

struct Pooled {
  at::Tensor output;
  std::vector<int64_t> suspects;  // The numbers of bags.
  int64_t dismissed = 0;  // The number of bags that a second computation cleared.
};
Pooled run(const Batch& b, Kernel kernel, bool half, const Site& site);

}  // namespace holdfast
