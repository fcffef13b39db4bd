// Views of tensors as batches of strided matrices, and loops over their rows in parallel.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>

#include "core/reduce.h"

namespace holdfast {

constexpr int64_t kRowsPerTask = 128;
constexpr int64_t kMostRowsPerTask = 512;  // A transposed view is read in longer runs of memory.
constexpr int64_t kElementsPerThread = 32768;

inline Element element_of(at::ScalarType type) {
  switch (type) {
    case at::kDouble: return Element::f64;
    case at::kFloat: return Element::f32;
    case at::kHalf: return Element::f16;
    default: return Element::bf16;
  }
}

// The memory of a batch of matrices. Views of a tensor would be made through torch's dispatcher,
// which takes longer than the check of a small product.
struct MatrixBatch {
  at::Tensor owner;
  std::array<int64_t, 3> sizes, strides;  // In elements.

  // A matrix is a batch of one.
  explicit MatrixBatch(const at::Tensor& t) : owner(t), sizes{1, 1, 1}, strides{0, 0, 0} {
    const int64_t first = 3 - t.dim();
    for (int64_t d = 0; d < t.dim(); ++d) {
      sizes[static_cast<size_t>(first + d)] = t.size(d);
      strides[static_cast<size_t>(first + d)] = t.stride(d);
    }
  }
  int64_t size(size_t d) const { return sizes[d]; }
  int64_t stride(size_t d) const { return strides[d]; }
  bool walkable() const {
    return sizes[2] == 1 || sizes[1] == 1 || strides[2] == 1 || strides[1] == 1;
  }
};

// Returns a batch whose rows or columns are contiguous; copies the tensor only if neither are.
inline MatrixBatch prepared(const at::Tensor& t) {
  MatrixBatch batch(t);
  return batch.walkable() ? batch : MatrixBatch(t.contiguous());
}

// Returns the rows [begin, end) of one matrix of a batch.
inline MatrixView rows_of(const MatrixBatch& t, int64_t batch, int64_t begin, int64_t end) {
  int64_t row_stride = t.stride(1), col_stride = t.stride(2);
  if (t.size(2) == 1) col_stride = 1;
  if (t.size(1) == 1 && col_stride != 1) row_stride = 1;
  const int64_t offset = (batch * t.stride(0) + begin * row_stride) * t.owner.element_size();
  const char* data = static_cast<const char*>(t.owner.const_data_ptr()) + offset;
  return {data, end - begin, t.size(2), row_stride, col_stride};
}

inline const char* at_element(const MatrixView& m, int64_t offset, Element element) {
  const int64_t bytes = element == Element::f64 ? 8 : element == Element::f32 ? 4 : 2;
  return static_cast<const char*>(m.data) + offset * bytes;
}

inline MatrixView row_of(const MatrixView& m, int64_t row, Element element) {
  const char* data = at_element(m, row * m.row_stride, element);
  return {data, 1, m.cols, m.row_stride, m.col_stride};
}

// Returns the columns [begin, end) of a view.
inline MatrixView columns_of(const MatrixView& m, int64_t begin, int64_t end, Element element) {
  const char* data = at_element(m, begin * m.col_stride, element);
  return {data, m.rows, end - begin, m.row_stride, m.col_stride};
}

// The range of sums of squares whose fp32 partial sums neither overflow nor underflow.
constexpr double kLeastFast = 1e-28, kMostFast = 1e28;
inline bool in_fast_range(double square) { return square >= kLeastFast && square <= kMostFast; }

// Returns how many rows a task takes: more for a transposed view that has enough for every thread.
inline int64_t rows_per_task(const MatrixBatch& t) {
  const bool transposed = t.stride(1) == 1 && t.size(2) > 1 && t.stride(2) != 1;
  const int64_t tasks = t.size(0) * t.size(1) / kMostRowsPerTask;
  return transposed && tasks >= at::get_num_threads() ? kMostRowsPerTask : kRowsPerTask;
}

// Calls body(batch, begin, end) for blocks of the rows of all matrices, in parallel. The body must
// compute the same for a row in any block, so that results do not depend on the number of threads.
template <typename Body>
void for_row_blocks(
    const MatrixBatch& t, int64_t elements_per_row, int64_t rows, const Body& body) {
  const int64_t blocks = (t.size(1) + rows - 1) / rows;
  const int64_t per_block = std::max<int64_t>(1, rows * elements_per_row);
  const int64_t grain = std::max<int64_t>(1, kElementsPerThread / per_block);
  at::parallel_for(0, t.size(0) * blocks, grain, [&](int64_t first, int64_t last) {
    for (int64_t task = first; task < last; ++task) {
      const int64_t begin = (task % blocks) * rows;
      body(task / blocks, begin, std::min(begin + rows, t.size(1)));
    }
  });
}

}  // namespace holdfast
