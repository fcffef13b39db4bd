#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "threshold.h"
#include "verify.h"
#include "views.h"
#include "weightings.h"

namespace holdfast {

namespace {

// Sums of squares that fp32 partial sums hold with room to spare.
constexpr double kLeast = 1e-28, kMost = 1e28;

// One entry's share of the fingerprint (checksums/rows.py computes the same).
uint64_t mixed(double entry, uint64_t position) {
  uint64_t bits;
  std::memcpy(&bits, &entry, sizeof bits);
  const uint64_t product = (bits ^ position * 0x9E3779B97F4A7C15u) * 0xD6E8FEB86659FD93u;
  return product ^ product >> 32;
}

// Of one matrix's row sums, and of its statistics but the last, which is this fingerprint.
double fingerprint(const double* row_sum, const double* statistics, int64_t inner) {
  uint64_t mix = 0;
  for (int64_t k = 0; k < inner; ++k) mix ^= mixed(row_sum[k], static_cast<uint64_t>(k));
  for (int64_t k = 0; k <= inner; ++k) mix ^= mixed(statistics[k], static_cast<uint64_t>(inner + k));
  return static_cast<double>(static_cast<uint32_t>(mix));
}

void reduce_rows_of_b(Element element, const MatrixView& rows, const RowSums& out) {
  const Weights signs = sign_weights(rows.cols);
  reduce_rows()(element, Precision::fast, rows, signs, out);
  if (element == Element::f64) return;
  for (int64_t i = 0; i < rows.rows; ++i) {
    if (out.square[i] >= kLeast && out.square[i] <= kMost) continue;
    const auto* data = static_cast<const char*>(rows.data);
    const int64_t bytes = element == Element::f32 ? 4 : 2;
    const MatrixView row{
        data + i * rows.row_stride * bytes, 1, rows.cols, rows.row_stride, rows.col_stride};
    const RowSums one{out.weighted + i, out.square + i, out.plain + i};
    reduce_rows()(element, Precision::wide, row, signs, one);
  }
}

// thresholds/rounding.py, b_statistics: z in place of the squares, and h behind them.
void derive_statistics(double* square, const double* plain, int64_t inner, int64_t columns) {
  const Growth growth(inner);
  const double count = static_cast<double>(columns);
  bool repeats = false;
  for (int64_t k = 1; k < inner && !repeats; ++k) {
    repeats = square[k] == square[k - 1] && plain[k] == plain[k - 1] && square[k] != 0;
  }
  const double drift = repeats ? growth.repeated : growth.drift;
  const double noise = threshold_model().mean_noise / (count * count);
  for (int64_t k = 0; k < inner; ++k) {
    const double mean = plain[k] / count;
    const double beyond = std::max(0.0, mean * mean - noise * square[k]);
    square[k] = growth.walk * square[k] + drift * static_cast<double>(inner) * count * beyond;
  }
  square[inner] = drift;
}

}  // namespace

Encoding encode(const at::Tensor& b_any) {
  const at::Tensor b = prepared(b_any);
  const int64_t batches = b.size(0), inner = b.size(1), columns = b.size(2);
  const auto options = b.options().dtype(at::kDouble);
  at::Tensor sums = at::empty({batches, inner}, options);
  at::Tensor plains = at::empty({batches, inner}, options);
  at::Tensor statistics = at::empty({batches, inner + 2}, options);
  double* sum = sums.data_ptr<double>();
  double* plain = plains.data_ptr<double>();
  double* square = statistics.data_ptr<double>();
  const Element element = element_of(b.scalar_type());
  for_row_blocks(b, columns, [&](int64_t batch, int64_t begin, int64_t end) {
    const int64_t at = batch * inner + begin;
    const RowSums out{sum + at, square + batch * (inner + 2) + begin, plain + at};
    reduce_rows_of_b(element, rows_of(b, batch, begin, end), out);
  });
  for (int64_t batch = 0; batch < batches; ++batch) {
    double* own = square + batch * (inner + 2);
    derive_statistics(own, plain + batch * inner, inner, columns);
    own[inner + 1] = fingerprint(sum + batch * inner, own, inner);
  }
  return {sums, statistics};
}

bool intact(const Encoding& encoding) {
  const int64_t inner = encoding.row_sum.size(1);
  for (int64_t batch = 0; batch < encoding.row_sum.size(0); ++batch) {
    const double* sums = encoding.row_sum.const_data_ptr<double>() + batch * inner;
    const double* own = encoding.statistics.const_data_ptr<double>() + batch * (inner + 2);
    if (fingerprint(sums, own, inner) != own[inner + 1]) return false;
  }
  return true;
}

}  // namespace holdfast
