#include "verify.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace holdfast {

namespace {

constexpr int64_t kRowsPerTask = 64;
constexpr int64_t kElementsPerThread = 32768;

Element element_of(at::ScalarType type) {
  switch (type) {
    case at::kDouble: return Element::f64;
    case at::kFloat: return Element::f32;
    case at::kHalf: return Element::f16;
    default: return Element::bf16;
  }
}

double smallest_subnormal(Element element) {
  switch (element) {
    case Element::f64: return std::numeric_limits<double>::denorm_min();
    case Element::f32: return std::numeric_limits<float>::denorm_min();
    case Element::f16: return 0x1p-24;
    case Element::bf16: return 0x1p-133;
  }
  return 0;
}

at::Tensor as_batch(const at::Tensor& t) { return t.dim() == 3 ? t : t.unsqueeze(0); }

bool walkable(const at::Tensor& t) {
  return t.size(2) == 1 || t.size(1) == 1 || t.stride(2) == 1 || t.stride(1) == 1;
}

// A 3-D tensor with one contiguous matrix direction; copies only where neither direction is.
at::Tensor prepared(const at::Tensor& t) {
  at::Tensor batch = as_batch(t);
  return walkable(batch) ? batch : batch.contiguous();
}

MatrixView rows_of(const at::Tensor& t, int64_t batch, int64_t begin, int64_t end) {
  int64_t row_stride = t.stride(1), col_stride = t.stride(2);
  if (t.size(2) == 1) col_stride = 1;
  if (t.size(1) == 1 && col_stride != 1) row_stride = 1;
  const int64_t offset = batch * t.stride(0) + begin * row_stride;
  const char* data = static_cast<const char*>(t.const_data_ptr()) + offset * t.element_size();
  return {data, end - begin, t.size(2), row_stride, col_stride};
}

// Calls body(batch, first row, last row) over all matrices, in parallel.
template <typename Body>
void for_row_blocks(const at::Tensor& t, const Body& body) {
  const int64_t blocks = (t.size(1) + kRowsPerTask - 1) / kRowsPerTask;
  const int64_t per_block = std::max<int64_t>(1, kRowsPerTask * t.size(2));
  const int64_t grain = std::max<int64_t>(1, kElementsPerThread / per_block);
  at::parallel_for(0, t.size(0) * blocks, grain, [&](int64_t first, int64_t last) {
    for (int64_t task = first; task < last; ++task) {
      const int64_t begin = (task % blocks) * kRowsPerTask;
      body(task / blocks, begin, std::min(begin + kRowsPerTask, t.size(1)));
    }
  });
}

double variance_bound(double sum, double low, double high, int64_t count) {
  const double mean = sum / static_cast<double>(count);
  return std::max(0.0, (high - mean) * (mean - low));
}

// One entry's share of the fingerprint (checksums/rows.py computes the same).
uint64_t mixed(double entry, uint64_t position) {
  uint64_t bits;
  std::memcpy(&bits, &entry, sizeof bits);
  const uint64_t product = (bits ^ position * 0x9E3779B97F4A7C15u) * 0xD6E8FEB86659FD93u;
  return product ^ product >> 32;
}

void summarise_rows(
    const double* sum, const double* low, const double* high, int64_t rows, int64_t cols,
    double* statistics) {
  double absolute = 0, squared = 0, variance = 0;
  uint64_t fingerprint = 0;
  for (int64_t k = 0; k < rows; ++k) {
    const double mean = sum[k] / static_cast<double>(cols);
    absolute += std::abs(mean);
    squared += mean * mean;
    variance += variance_bound(sum[k], low[k], high[k], cols);
    fingerprint ^= mixed(sum[k], static_cast<uint64_t>(k));
  }
  statistics[0] = absolute;
  statistics[1] = squared;
  statistics[2] = variance;
  statistics[3] = static_cast<double>(static_cast<uint32_t>(fingerprint));
}

// What the addend contributes to a row: its sum, and its share of the threshold.
struct Addend {
  at::Tensor sum, share;  // fp64 [batch, M], or [1, 1] where every row has the same
};

Addend reduce_addend(const Problem& problem, const at::Tensor& c) {
  const double scale = threshold_model().c_sigma * std::sqrt(static_cast<double>(c.size(2)));
  at::Tensor full = problem.addend->expand(c.sizes());
  const bool same_rows = full.stride(0) == 0 && full.stride(1) == 0;
  if (same_rows) full = full.slice(0, 0, 1).slice(1, 0, 1);
  full = prepared(full);
  const auto options = c.options().dtype(at::kDouble);
  at::Tensor sum = at::empty({full.size(0), full.size(1)}, options);
  at::Tensor share = at::empty_like(sum);
  const Element element = element_of(full.scalar_type());
  for_row_blocks(full, [&](int64_t batch, int64_t begin, int64_t end) {
    double low[kRowsPerTask], high[kRowsPerTask];
    double* sums = sum.data_ptr<double>() + batch * full.size(1) + begin;
    double* shares = share.data_ptr<double>() + batch * full.size(1) + begin;
    RowResults out;
    out.sum = sums;
    out.low = low;
    out.high = high;
    reduce_rows()(element, Pass::encode, rows_of(full, batch, begin, end), nullptr, out);
    for (int64_t i = 0; i < end - begin; ++i) {
      const double variance = variance_bound(sums[i], low[i], high[i], full.size(2));
      shares[i] = std::abs(sums[i]) + scale * std::sqrt(variance);
    }
  });
  return {sum, share};
}

// V-ABFT's threshold without e_max (methods: section 4), from A's row and the sums over B.
double vabft_scale(double mean, double variance, double columns, const double* statistics) {
  const double c = threshold_model().c_sigma;
  const double between = columns * mean * mean * statistics[2] +
      columns * columns * variance * statistics[1];
  return columns * std::abs(mean) * statistics[0] + c * std::sqrt(between) +
      c * std::sqrt(columns * variance * statistics[2]);
}

void count_suspects(Verdict& verdict, int64_t columns) {
  const int64_t rows = verdict.rows.numel() / 3;
  const double* residual = verdict.rows.const_data_ptr<double>();
  const double* threshold = residual + rows;
  const double* energy = threshold + rows;
  for (int64_t i = 0; i < rows; ++i) {
    // Written so that a NaN on either side counts as suspect.
    const bool clean = std::isfinite(threshold[i]) && std::abs(residual[i]) <= threshold[i] &&
        energy[i] <= threshold_model().extreme_energy;
    verdict.suspects += clean ? 0 : 1;
    const double rms = std::sqrt(energy[i] / static_cast<double>(columns));
    if (clean && rms > 0) {
      verdict.line += threshold[i] / rms;
      verdict.line_rows += 1;
    }
  }
}

}  // namespace

ThresholdModel& threshold_model() {
  static ThresholdModel model;
  return model;
}

bool supported(const at::Tensor& tensor) {
  const auto type = tensor.scalar_type();
  return type == at::kDouble || type == at::kFloat || type == at::kHalf || type == at::kBFloat16;
}

Encoding encode(const at::Tensor& b_any) {
  const at::Tensor b = prepared(b_any);
  const int64_t batches = b.size(0), rows = b.size(1), cols = b.size(2);
  const auto options = b.options().dtype(at::kDouble);
  at::Tensor sums = at::empty({batches, rows}, options);
  at::Tensor extremes = at::empty({2, batches, rows}, options);
  at::Tensor statistics = at::empty({batches, 4}, options);
  double* sum = sums.data_ptr<double>();
  double* low = extremes.data_ptr<double>();
  double* high = low + batches * rows;
  const Element element = element_of(b.scalar_type());
  for_row_blocks(b, [&](int64_t batch, int64_t begin, int64_t end) {
    const int64_t at = batch * rows + begin;
    RowResults out;
    out.sum = sum + at;
    out.low = low + at;
    out.high = high + at;
    reduce_rows()(element, Pass::encode, rows_of(b, batch, begin, end), nullptr, out);
  });
  for (int64_t batch = 0; batch < batches; ++batch) {
    const int64_t at = batch * rows;
    summarise_rows(
        sum + at, low + at, high + at, rows, cols, statistics.data_ptr<double>() + batch * 4);
  }
  return {sums, statistics};
}

Verdict verify(const at::Tensor& c_any, const Problem& problem, const Encoding& encoding) {
  const at::Tensor c = prepared(c_any), a = prepared(problem.a);
  const int64_t batches = c.size(0), rows = c.size(1), columns = c.size(2), inner = a.size(2);
  const Element element = element_of(c.scalar_type());
  const Element operand = element_of(a.scalar_type());
  const double e_max = threshold_model().e_max[static_cast<int>(element)];
  const double underflow = static_cast<double>(columns) * smallest_subnormal(element);
  const bool has_addend = problem.addend.has_value() && problem.beta != 0;
  const Addend addend = has_addend ? reduce_addend(problem, c) : Addend{};
  const bool per_row = has_addend && addend.sum.numel() != 1;

  Verdict verdict;
  verdict.rows = at::empty({3, batches, rows}, c.options().dtype(at::kDouble));
  double* residual = verdict.rows.data_ptr<double>();
  double* threshold = residual + batches * rows;
  double* energy = threshold + batches * rows;

  for_row_blocks(c, [&](int64_t batch, int64_t begin, int64_t end) {
    const int64_t at = batch * rows + begin, count = end - begin;
    double dot[kRowsPerTask], sum[kRowsPerTask], low[kRowsPerTask], high[kRowsPerTask];
    RowResults actual, predicted;
    actual.sum = residual + at;
    actual.square = energy + at;
    predicted.sum = sum;
    predicted.dot = dot;
    predicted.low = low;
    predicted.high = high;
    reduce_rows()(element, Pass::output, rows_of(c, batch, begin, end), nullptr, actual);
    const double* weights = encoding.row_sum.const_data_ptr<double>() + batch * inner;
    reduce_rows()(operand, Pass::operand, rows_of(a, batch, begin, end), weights, predicted);
    const double* statistics = encoding.statistics.const_data_ptr<double>() + batch * 4;
    for (int64_t i = 0; i < count; ++i) {
      const double variance = variance_bound(sum[i], low[i], high[i], inner);
      const double mean = sum[i] / static_cast<double>(inner);
      double expected = problem.alpha * dot[i];
      double scale = std::abs(problem.alpha) *
          vabft_scale(mean, variance, static_cast<double>(columns), statistics);
      if (has_addend) {
        const int64_t row = per_row ? at + i : 0;
        expected += problem.beta * addend.sum.const_data_ptr<double>()[row];
        scale += std::abs(problem.beta) * addend.share.const_data_ptr<double>()[row];
      }
      residual[at + i] -= expected;
      threshold[at + i] = e_max * scale + underflow;
    }
  });
  count_suspects(verdict, columns);
  return verdict;
}

}  // namespace holdfast
