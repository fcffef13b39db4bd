#include "gemm/incremental_checksums.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "core/checksum_weights.h"
#include "core/views.h"
#include "gemm/encode.h"

namespace holdfast {

namespace {

constexpr int64_t kTogether = 4;  // rows that are added in independent chains

struct Sums {
  double* signed_sum;
  double* square;
  double* plain;
};

template <typename T>
void add_row_block(
    const T* data, int64_t row_stride, int64_t column_stride, int64_t rows, int64_t columns,
    const double* signs, const Sums& out) {
  double s[kTogether], q[kTogether], p[kTogether];
  std::copy_n(out.signed_sum, rows, s);
  std::copy_n(out.square, rows, q);
  std::copy_n(out.plain, rows, p);
  for (int64_t j = 0; j < columns; ++j) {
    for (int64_t i = 0; i < rows; ++i) {
      const double x = static_cast<double>(data[i * row_stride + j * column_stride]);
      s[i] += signs[j] * x;
      q[i] += x * x;
      p[i] += x;
    }
  }
  std::copy_n(s, rows, out.signed_sum);
  std::copy_n(q, rows, out.square);
  std::copy_n(p, rows, out.plain);
}

}  // namespace

void add_columns(const at::Tensor& sums, const at::Tensor& b, int64_t first) {
  const int64_t inner = b.size(1), columns = b.size(2);
  const double* signs = sign_weights(first + columns).wide + first;
  double* all = sums.data_ptr<double>();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, b.scalar_type(), "add_columns", [&] {
    const scalar_t* data = b.const_data_ptr<scalar_t>();
    for_row_blocks(
        MatrixBatch(b), columns, kRowsPerTask, [&](int64_t batch, int64_t begin, int64_t end) {
          double* own = all + batch * 3 * inner;
          for (int64_t k = begin; k < end; k += kTogether) {
            const scalar_t* rows = data + batch * b.stride(0) + k * b.stride(1);
            const Sums out{own + k, own + inner + k, own + 2 * inner + k};
            const int64_t count = std::min(kTogether, end - k);
            if (count == kTogether) {
              add_row_block(rows, b.stride(1), b.stride(2), kTogether, columns, signs, out);
            } else {
              add_row_block(rows, b.stride(1), b.stride(2), count, columns, signs, out);
            }
          }
        });
  });
}

Encoding encoding_of_sums(const at::Tensor& sums, int64_t columns, at::ScalarType type) {
  const int64_t batches = sums.size(0), inner = sums.size(2);
  Encoding encoding{
      sums.select(1, 0).clone(at::MemoryFormat::Contiguous),
      at::empty({batches, inner + 2}, sums.options())};
  const Element element = element_of(type);
  const bool means = c10::elementSize(type) > 2;
  const double* all = sums.const_data_ptr<double>();
  double* derived = encoding.statistics.data_ptr<double>();
  at::parallel_for(0, batches, std::max<int64_t>(1, 4096 / inner), [&](int64_t begin, int64_t end) {
    for (int64_t batch = begin; batch < end; ++batch) {
      const double* own = all + batch * 3 * inner;
      double* statistics = derived + batch * (inner + 2);
      std::copy_n(own + inner, inner, statistics);
      derive_statistics(element, statistics, means ? own + 2 * inner : nullptr, inner, columns);
      statistics[inner + 1] = fingerprint(own, statistics, inner);
    }
  });
  return encoding;
}

at::Tensor fingerprints(const at::Tensor& sums) {
  at::Tensor result = at::empty({sums.size(0)}, sums.options());
  const int64_t entries = sums.numel() / sums.size(0);
  const double* all = sums.const_data_ptr<double>();
  double* out = result.data_ptr<double>();
  at::parallel_for(
      0, sums.size(0), std::max<int64_t>(1, 8192 / entries), [&](int64_t begin, int64_t end) {
        for (int64_t batch = begin; batch < end; ++batch) {
          out[batch] = fingerprint(all + batch * entries, entries);
        }
      });
  return result;
}

}  // namespace holdfast
