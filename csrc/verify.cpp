#include "verify.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <mutex>
#include <vector>

#include "encode.h"
#include "threshold.h"
#include "views.h"
#include "weightings.h"

namespace holdfast {

namespace {

constexpr int64_t kManyColumns = 64;  // from here on one wrong element stands out of its row
constexpr double kStandsOut = 20;     // times the median error of the row
constexpr double kSettled = 1e-4;  // share of the extreme energy above which a sample does not do

// What the addend contributes to each row: its signed sum and its energy.
struct Addend {
  at::Tensor sum, energy;  // fp64 [batch, M], or [1, 1] where every row has the same
};

Addend reduce_addend(const Problem& problem, const at::Tensor& c) {
  at::Tensor full = problem.addend->expand(c.sizes());
  const bool same_rows = full.stride(0) == 0 && full.stride(1) == 0;
  if (same_rows) full = full.slice(0, 0, 1).slice(1, 0, 1);
  full = prepared(full);
  at::Tensor sum = at::empty({full.size(0), full.size(1)}, c.options().dtype(at::kDouble));
  at::Tensor energy = at::empty_like(sum);
  const Element element = element_of(full.scalar_type());
  for_row_blocks(full, full.size(2), [&](int64_t batch, int64_t begin, int64_t end) {
    const int64_t at = batch * full.size(1) + begin;
    const RowSums out{sum.data_ptr<double>() + at, energy.data_ptr<double>() + at};
    const Weights signs = sign_weights(full.size(2));
    reductions().rows(element, Precision::wide, rows_of(full, batch, begin, end), signs, {}, out);
  });
  return {sum, energy};
}

// The pass over A: its products with the encoding of B, and whatever else is shared.
class ReadingOfA {
 public:
  ReadingOfA(const at::Tensor& a, Sharing& sharing)
      : sharing_(sharing), element_(element_of(a.scalar_type())), inner_(a.size(2)) {
    if (sharing.encode_a) encoder_.emplace(a);
    if (sharing.row_weights.defined()) {
      sharing.column_sums = at::zeros({inner_}, a.options().dtype(at::kDouble));
    }
  }

  // Of the rows from `begin` of one matrix.
  void dots(
      const MatrixView& rows, const double* row_sums, int64_t batch, int64_t begin, double* dot) {
    if (sharing_.dots.defined()) {
      std::copy_n(sharing_.dots.const_data_ptr<double>() + begin, rows.rows, dot);
      return;
    }
    const FastWeights encoded(row_sums, inner_, element_);
    if (encoder_) {
      encoder_->read(rows, batch, begin, encoded.view(), dot);
    } else if (sharing_.row_weights.defined()) {
      cross(rows, encoded.view(), begin, dot);
    } else {
      reductions().rows(element_, Precision::fast, rows, encoded.view(), {}, {dot});
    }
  }

  void finish() {
    if (encoder_) sharing_.of_a = encoder_->finish();
  }

 private:
  void cross(const MatrixView& rows, const Weights& encoded, int64_t begin, double* dot) {
    float by_row[kRowsPerTask];
    const double* weights = sharing_.row_weights.const_data_ptr<double>() + begin;
    std::transform(weights, weights + rows.rows, by_row, [](double w) { return static_cast<float>(w); });
    std::vector<float> columns(static_cast<size_t>(inner_));
    reductions().cross(element_, rows, {encoded.narrow, by_row, dot, columns.data()});
    const std::lock_guard<std::mutex> lock(mutex_);
    double* sums = sharing_.column_sums.data_ptr<double>();
    for (int64_t j = 0; j < inner_; ++j) sums[j] += columns[j];
  }

  Sharing& sharing_;
  Element element_;
  int64_t inner_;
  std::optional<Encoder> encoder_;
  std::mutex mutex_;  // guards the column sums
};

// One row of a product in fp64, and what its partial sums amount to at most.
struct ExactRow {
  std::vector<double> values;
  double magnitude = 0;  // Σ_k a_k² Σ_j b_kj²
};

template <typename T>
ExactRow exact_row(const MatrixView& a, const MatrixView& b, double alpha) {
  ExactRow row{std::vector<double>(static_cast<size_t>(b.cols)), 0};
  for (int64_t k = 0; k < b.rows; ++k) {
    const double factor = static_cast<const T*>(a.data)[k * a.col_stride];
    const T* from = static_cast<const T*>(b.data) + k * b.row_stride;
    double energy = 0;
    for (int64_t j = 0; j < b.cols; ++j) {
      const double value = from[j * b.col_stride];
      row.values[static_cast<size_t>(j)] += alpha * factor * value;
      energy += value * value;
    }
    row.magnitude += factor * factor * energy;
  }
  return row;
}

// One product under verification.
class Check {
 public:
  Check(const at::Tensor& c, const Problem& problem, const Encoding& encoding)
      : c_(prepared(c)),
        a_(prepared(problem.a)),
        b_(problem.b.defined() ? prepared(problem.b) : at::Tensor()),
        encoding_(encoding),
        alpha_(problem.alpha),
        beta_(problem.beta),
        inner_(a_.size(2)),
        element_(element_of(c_.scalar_type())),
        operand_(element_of(a_.scalar_type())),
        threshold_(element_, inner_, c_.size(2), problem.alpha) {
    if (problem.addend.has_value() && beta_ != 0) {
      addend_ = reduce_addend(problem, c_);
      full_addend_ = as_batch(problem.addend->expand(c.sizes()));
      per_row_ = addend_.sum.numel() != 1;
    }
  }

  const at::Tensor& c() const { return c_; }
  const at::Tensor& a() const { return a_; }

  struct Row {
    double residual, threshold, energy;
  };

  // In fp64, with the full threshold.
  Row settle(int64_t batch, int64_t row) const {
    const Weights signs = sign_weights(c_.size(2));
    double sum, energy, dot, walk;
    const auto reduce = reductions().rows;
    reduce(element_, Precision::wide, rows_of(c_, batch, row, row + 1), signs, {}, {&sum, &energy});
    Weights encoded;
    encoded.wide = row_sums(batch);
    encoded.scale = statistics(batch);
    reduce(operand_, Precision::wide, rows_of(a_, batch, row, row + 1), encoded, {}, {&dot, &walk});
    const double threshold = threshold_(walk, energy, drift(batch), added_energy(batch, row));
    return {sum - expected(batch, row, dot), threshold, energy};
  }

  static bool suspect(const Row& row) {
    // Written so that a NaN on either side counts.
    return !(std::isfinite(row.threshold) && std::abs(row.residual) <= row.threshold &&
             row.energy <= threshold_model().extreme_energy);
  }

  // Suspects among rows begin … end. The fast pass knows less than the full threshold, a lower
  // bound of it: rows within that are clean, the others are settled.
  int64_t count(int64_t batch, int64_t begin, int64_t end, ReadingOfA& reading) const {
    double sum[kRowsPerTask], energy[kRowsPerTask], dot[kRowsPerTask];
    RowSums of_c{sum, energy};
    of_c.sample = true;
    const Weights signs = sign_weights(c_.size(2));
    reductions().rows(
        element_, Precision::fast, rows_of(c_, batch, begin, end), signs, {}, of_c);
    reading.dots(rows_of(a_, batch, begin, end), row_sums(batch), batch, begin, dot);
    int64_t suspects = 0;
    for (int64_t i = 0; i < end - begin; ++i) {
      const double residual = sum[i] - expected(batch, begin + i, dot[i]);
      const double least = threshold_(0, energy[i], drift(batch), 0);
      const bool clean = std::isfinite(least) && std::abs(residual) <= least &&
          energy[i] <= kSettled * threshold_model().extreme_energy &&
          (element_ == Element::f64 || in_fast_range(energy[i]));
      if (clean) continue;
      const Row row = settle(batch, begin + i);
      suspects += suspect(row) && !accumulated(row, batch, begin + i) ? 1 : 0;
    }
    return suspects;
  }

 private:
  // Whether accumulation that drifted up and back explains the row: its residual is within what
  // partial sums of one sign may lose, and of its elements, computed again in fp64, none stands out.
  bool accumulated(const Row& row, int64_t batch, int64_t index) const {
    const int64_t columns = c_.size(2);
    const bool rounds = element_ == Element::f16 || element_ == Element::bf16;
    if (rounds || !b_.defined() || columns < kManyColumns || !std::isfinite(row.energy) ||
        !(row.energy <= threshold_model().extreme_energy)) {
      return false;
    }
    return element_ == Element::f32 ? accumulated<float>(row, batch, index)
                                    : accumulated<double>(row, batch, index);
  }

  template <typename T>
  bool accumulated(const Row& row, int64_t batch, int64_t index) const {
    const MatrixView b = rows_of(b_, batch, 0, inner_);
    const ExactRow exact = exact_row<T>(rows_of(a_, batch, index, index + 1), b, alpha_);
    const Growth growth(inner_);
    const double drifting = growth.walk + growth.drift * static_cast<double>(inner_);
    const double most = threshold_(
        drifting * exact.magnitude, row.energy, drift(batch), added_energy(batch, index));
    if (!(std::abs(row.residual) <= most)) return false;
    const MatrixView c = rows_of(c_, batch, index, index + 1);
    std::vector<double> errors;
    for (int64_t j = 0; j < c.cols; ++j) {
      double expected = exact.values[static_cast<size_t>(j)];
      if (addend_.sum.defined()) {
        const MatrixView d = rows_of(full_addend_, batch, index, index + 1);
        expected += beta_ * static_cast<const T*>(d.data)[j * d.col_stride];
      }
      errors.push_back(std::abs(static_cast<const T*>(c.data)[j * c.col_stride] - expected));
    }
    const auto middle = errors.begin() + static_cast<int64_t>(errors.size() / 2);
    std::nth_element(errors.begin(), middle, errors.end());
    return *std::max_element(middle, errors.end()) <= kStandsOut * *middle;
  }

  const double* row_sums(int64_t batch) const {
    return encoding_.row_sum.const_data_ptr<double>() + batch * inner_;
  }
  const double* statistics(int64_t batch) const {
    return encoding_.statistics.const_data_ptr<double>() + batch * (inner_ + 2);
  }
  double drift(int64_t batch) const { return statistics(batch)[inner_]; }
  double of_addend(const at::Tensor& values, int64_t batch, int64_t row) const {
    if (!addend_.sum.defined()) return 0;
    return values.const_data_ptr<double>()[per_row_ ? batch * c_.size(1) + row : 0];
  }
  double added_energy(int64_t batch, int64_t row) const {
    return beta_ * beta_ * of_addend(addend_.energy, batch, row);
  }
  double expected(int64_t batch, int64_t row, double dot) const {
    return alpha_ * dot + beta_ * of_addend(addend_.sum, batch, row);
  }

  at::Tensor c_, a_, b_, full_addend_;
  const Encoding& encoding_;
  double alpha_, beta_;
  int64_t inner_;
  Element element_, operand_;
  Threshold threshold_;
  Addend addend_;
  bool per_row_ = false;
};

}  // namespace

ThresholdModel& threshold_model() {
  static ThresholdModel model;
  return model;
}

bool supported(const at::Tensor& tensor) {
  const auto type = tensor.scalar_type();
  return type == at::kDouble || type == at::kFloat || type == at::kHalf || type == at::kBFloat16;
}

bool sums_columns(const at::Tensor& a) {
  return a.dim() == 2 && a.stride(1) == 1 && a.size(1) % kColumnStep == 0 &&
      a.scalar_type() != at::kDouble;
}

int64_t count_suspects(
    const at::Tensor& c, const Problem& problem, const Encoding& encoding, Sharing& sharing) {
  const Check check(c, problem, encoding);
  ReadingOfA reading(check.a(), sharing);
  std::atomic<int64_t> suspects{0};
  const int64_t per_row = check.c().size(2) + check.a().size(2);
  for_row_blocks(check.c(), per_row, [&](int64_t batch, int64_t begin, int64_t end) {
    suspects += check.count(batch, begin, end, reading);
  });
  reading.finish();
  return suspects;
}

at::Tensor verify(const at::Tensor& c, const Problem& problem, const Encoding& encoding) {
  const Check check(c, problem, encoding);
  const int64_t batches = check.c().size(0), rows = check.c().size(1);
  at::Tensor result = at::empty({3, batches, rows}, c.options().dtype(at::kDouble));
  double* residual = result.data_ptr<double>();
  double* threshold = residual + batches * rows;
  double* energy = threshold + batches * rows;
  const int64_t per_row = check.c().size(2) + problem.a.size(-1);
  for_row_blocks(check.c(), per_row, [&](int64_t batch, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const Check::Row settled = check.settle(batch, row);
      residual[batch * rows + row] = settled.residual;
      threshold[batch * rows + row] = settled.threshold;
      energy[batch * rows + row] = settled.energy;
    }
  });
  return result;
}

double detection_line(const at::Tensor& c, const Problem& problem, const Encoding& encoding) {
  const Check::Row first = Check(c, problem, encoding).settle(0, 0);
  const double rms = std::sqrt(first.energy / static_cast<double>(c.size(-1)));
  return rms > 0 && std::isfinite(rms) ? first.threshold / rms : 0;
}

}  // namespace holdfast
