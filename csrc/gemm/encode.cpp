#include "gemm/encode.h"

#include <ATen/EmptyTensor.h>

#include <algorithm>
#include <cmath>

#include "core/checksum_weights.h"
#include "core/threshold.h"

namespace holdfast {

namespace {

constexpr int64_t kPieceBytes = 256 * 1024;  // Read along both dimensions while L2 has it.

double low_word(uint64_t mix) { return static_cast<double>(static_cast<uint32_t>(mix)); }

template <typename Bits>
bool repeats_row_before(const MatrixView& m, int64_t row) {
  const Bits* here = static_cast<const Bits*>(m.data) + row * m.row_stride;
  for (int64_t j = 0; j < m.cols; ++j) {
    if (here[j * m.col_stride] != here[j * m.col_stride - m.row_stride]) return false;
  }
  return true;
}

// Compares a row with the one before it, bit for bit.
bool repeats_row_before(Element element, const MatrixView& m, int64_t row) {
  switch (element) {
    case Element::f64: return repeats_row_before<uint64_t>(m, row);
    case Element::f32: return repeats_row_before<uint32_t>(m, row);
    default: return repeats_row_before<uint16_t>(m, row);
  }
}

// Reduces the columns [begin, end) of a view.
void reduce_columns(
    Element element, const MatrixView& m, int64_t begin, int64_t end, const Weights& other,
    const RowSums& out) {
  const auto from = [&](auto* weights) { return weights == nullptr ? weights : weights + begin; };
  const auto all_from = [&](const Weights& w) {
    return Weights{from(w.wide), from(w.narrow), from(w.high), from(w.low), from(w.scale)};
  };
  reductions().rows(
      element, Precision::fast, columns_of(m, begin, end, element), all_from(sign_weights(end)),
      all_from(other), out);
}

// Adds the sums of the first rows to others.
void add(const RowSums& more, int64_t rows, const RowSums& to) {
  const auto add_one = [rows](const double* from, double* sum) {
    for (int64_t i = 0; sum != nullptr && i < rows; ++i) sum[i] += from[i];
  };
  add_one(more.weighted, to.weighted);
  add_one(more.square, to.square);
  add_one(more.plain, to.plain);
  add_one(more.dot, to.dot);
}

}  // namespace

double fingerprint(const double* entries, int64_t count) {
  return low_word(reductions().mixed(entries, count, 0));
}

double fingerprint(const double* row_sum, const double* statistics, int64_t inner) {
  const auto mixed = reductions().mixed;
  return low_word(mixed(row_sum, inner, 0) ^ mixed(statistics, inner + 1, inner));
}

// Replaces the squares by z and appends h (`statistics` in thresholds/rounding.py). Elements of 16
// bits have no plain sums; the largest mean that the squares allow is used instead.
void derive_statistics(
    Element element, double* square, const double* plain, int64_t inner, int64_t columns,
    const MatrixView* rows) {
  const Growth growth(inner, element);
  const double count = static_cast<double>(columns);
  bool repeats = false;
  for (int64_t k = 1; k < inner && !repeats; ++k) {
    repeats = square[k] == square[k - 1] && square[k] != 0 &&
        (plain == nullptr || plain[k] == plain[k - 1]) &&
        (rows == nullptr || repeats_row_before(element, *rows, k));
  }
  const double drift = repeats ? growth.repeated : growth.drift;
  const double noise = threshold_model().mean_noise / (count * count);
  for (int64_t k = 0; k < inner; ++k) {
    double beyond = square[k] / count;
    if (plain != nullptr) {
      const double mean = plain[k] / count;
      beyond = std::max(0.0, mean * mean - noise * square[k]);
    }
    square[k] = growth.walk * square[k] + drift * static_cast<double>(inner) * count * beyond;
  }
  square[inner] = drift + threshold_model().check_steps;
}

Encoder::Encoder(const MatrixBatch& b)
    : b_(b),
      element_(element_of(b.owner.scalar_type())),
      inner_(b.size(1)),
      columns_(b.size(2)),
      completed_(static_cast<size_t>(b.size(0))) {
  encoding_.row_sum = at::detail::empty_cpu({b.size(0), inner_}, at::kDouble);
  encoding_.statistics = at::detail::empty_cpu({b.size(0), inner_ + 2}, at::kDouble);
  if (b.owner.element_size() > 2) plain_.resize(static_cast<size_t>(b.size(0) * inner_));
}

RowSums Encoder::sums_from(int64_t batch, int64_t begin, double* dot) {
  RowSums out{sums(batch) + begin, statistics(batch) + begin, plain(batch), dot};
  if (out.plain != nullptr) out.plain += begin;
  return out;
}

// Reads rows in fp64 where their partial sums left the range of fp32.
void Encoder::read_again(const MatrixView& rows, const RowSums& out) {
  bool all = true;
  for (int64_t i = 0; i < rows.rows; ++i) all &= in_fast_range(out.square[i]);
  if (all || element_ == Element::f64) return;
  const Weights signs = sign_weights(columns_);
  for (int64_t i = 0; i < rows.rows; ++i) {
    if (in_fast_range(out.square[i])) continue;
    const RowSums one{
        out.weighted + i, out.square + i, out.plain == nullptr ? nullptr : out.plain + i};
    reductions().rows(element_, Precision::wide, row_of(rows, i, element_), signs, {}, one);
  }
}

void Encoder::read(
    const MatrixView& rows, int64_t batch, int64_t begin, const Weights& other, double* dot) {
  const RowSums out = sums_from(batch, begin, dot);
  const int64_t length = rows.col_stride == 1 ? columns_ : std::min(columns_, kSegment);
  reduce_columns(element_, rows, 0, length, other, out);
  for (int64_t first = length; first < columns_; first += length) {
    double more[4][kMostRowsPerTask];
    const RowSums next{
        more[0], more[1], out.plain == nullptr ? nullptr : more[2], dot == nullptr ? dot : more[3]};
    reduce_columns(element_, rows, first, std::min(first + length, columns_), other, next);
    add(next, rows.rows, out);
  }
  read_again(rows, out);
}

RowSums Encoder::segment(int64_t number, int64_t begin) {
  if (number == 0) return sums_from(0, begin);
  double* first = segments_.data_ptr<double>() + (number - 1) * 3 * inner_ + begin;
  return {first, first + inner_, plain_.empty() ? nullptr : first + 2 * inner_};
}

void Encoder::prepare_segments() {
  segments_ = at::detail::empty_cpu({(columns_ - 1) / kSegment, 3, inner_}, at::kDouble);
}

void Encoder::read_columns(int64_t begin, int64_t end) {
  RowSums out = segment(begin / kSegment);
  out.onto = begin % kSegment != 0;
  reduce_columns(element_, rows_of(b_, 0, 0, inner_), begin, end, {}, out);
}

void Encoder::add_up(int64_t begin, int64_t end) {
  const RowSums out = segment(0, begin);
  for (int64_t number = 1; number * kSegment < columns_; ++number) {
    add(segment(number, begin), end - begin, out);
  }
  read_again(rows_of(b_, 0, begin, end), out);
}

void Encoder::complete(int64_t batch) {
  double* own = statistics(batch);
  const MatrixView rows = rows_of(b_, batch, 0, inner_);
  derive_statistics(element_, own, plain(batch), inner_, columns_, &rows);
  own[inner_ + 1] = fingerprint(sums(batch), own, inner_);
  completed_[static_cast<size_t>(batch)] = 1;
}

Encoding Encoder::finish() {
  for (int64_t batch = 0; batch < encoding_.row_sum.size(0); ++batch) {
    if (!completed_[static_cast<size_t>(batch)]) complete(batch);
  }
  return encoding_;
}

double* Encoder::sums(int64_t batch) {
  return encoding_.row_sum.data_ptr<double>() + batch * inner_;
}
double* Encoder::statistics(int64_t batch) {
  return encoding_.statistics.data_ptr<double>() + batch * (inner_ + 2);
}
double* Encoder::plain(int64_t batch) {
  return plain_.empty() ? nullptr : plain_.data() + batch * inner_;
}

Encoding encode(const at::Tensor& b_any) {
  const MatrixBatch b = prepared(b_any);
  Encoder encoder(b);
  for_row_blocks(b, b.size(2), rows_per_task(b), [&](int64_t batch, int64_t begin, int64_t end) {
    encoder.read(rows_of(b, batch, begin, end), batch, begin);
    if (end - begin == b.size(1)) encoder.complete(batch);  // this thread read it all
  });
  return encoder.finish();
}

std::pair<Encoding, Encoding> encode_both(const at::Tensor& b) {
  const bool turned = b.stride(0) == 1;
  const MatrixBatch rows(turned ? b.t() : b), columns(turned ? b : b.t());
  const int64_t width = rows.size(2);
  if (rows.size(1) < 2 || width < 2 || rows.stride(2) != 1 || rows.stride(1) < 2) {
    return {encode(b), encode(b.t())};  // no rows that are contiguous and apart
  }
  Encoder of_rows(rows), of_columns(columns);
  of_columns.prepare_segments();
  const int64_t fits = kPieceBytes / (width * b.element_size()) / kColumnsGathered;
  const int64_t piece =
      kColumnsGathered * std::clamp<int64_t>(fits, 1, kSegment / kColumnsGathered);
  for_row_blocks(rows, width, kSegment, [&](int64_t, int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; at += piece) {
      const int64_t stop = std::min(at + piece, end);
      of_columns.read_columns(at, stop);
      of_rows.read(rows_of(rows, 0, at, stop), 0, at);
    }
  });
  for_row_blocks(
      columns, columns.size(2) / kSegment + 1, kMostRowsPerTask,
      [&](int64_t, int64_t begin, int64_t end) { of_columns.add_up(begin, end); });
  std::pair both(of_rows.finish(), of_columns.finish());
  if (turned) std::swap(both.first, both.second);
  return both;
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
