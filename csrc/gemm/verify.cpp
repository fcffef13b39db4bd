#include "gemm/verify.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <numeric>
#include <utility>
#include <vector>

#include "core/callbacks.h"
#include "core/checksum_weights.h"
#include "core/threshold.h"
#include "core/views.h"
#include "gemm/encode.h"
#include "gemm/masked.h"

namespace holdfast {

namespace {

constexpr double kSettled = 1e-4;  // above this share of the extreme energy, sampling is too coarse

// The addend's contribution to each row: its signed sum and its sum of squares.
struct Addend {
  std::vector<double> sum, energy;  // [batch, M], or of one row where every row has the same
};

// Views the addend as broadcast to C, of which one row stands for all where all have the same.
MatrixBatch broadcast(const at::Tensor& addend, const MatrixBatch& c) {
  MatrixBatch full(addend);
  for (size_t d = 0; d < 3; ++d) {
    if (full.sizes[d] != c.sizes[d]) full.strides[d] = 0;
    full.sizes[d] = c.sizes[d];
  }
  if (full.stride(0) == 0 && full.stride(1) == 0) full.sizes[0] = full.sizes[1] = 1;
  return full;
}

Addend reduce_addend(const at::Tensor& given, const MatrixBatch& c) {
  MatrixBatch full = broadcast(given, c);
  if (!full.walkable()) full = MatrixBatch(given.expand_as(c.owner).contiguous());
  const size_t count = static_cast<size_t>(full.size(0) * full.size(1));
  Addend addend{std::vector<double>(count), std::vector<double>(count)};
  const Element element = element_of(given.scalar_type());
  const int64_t columns = full.size(2);
  for_row_blocks(full, columns, kRowsPerTask, [&](int64_t batch, int64_t begin, int64_t end) {
    const int64_t at = batch * full.size(1) + begin;
    const RowSums out{addend.sum.data() + at, addend.energy.data() + at};
    const Weights signs = sign_weights(columns);
    reductions().rows(element, Precision::wide, rows_of(full, batch, begin, end), signs, {}, out);
  });
  return addend;
}

// The statistics of a row of A from which its row of C is checked.
struct OfA {
  double dot;  // its product with the encoding of B
  double walk;  // a lower bound of Σ_k A_ik² z_k
};

// The pass over A, which computes its products with the encoding of B and the sums that `Sharing`
// asks for. For products that accumulate in the dtype of their elements it also computes the walk,
// which is most of their threshold.
class ReadingOfA {
 public:
  ReadingOfA(const MatrixBatch& a, Sharing& sharing)
      : sharing_(sharing), element_(element_of(a.owner.scalar_type())), inner_(a.size(2)) {
    if (sharing.encode_a) encoder_.emplace(a);
    if (sharing.across) {
      const auto options = a.owner.options().dtype(at::kDouble);
      sharing.column_sums = at::zeros({inner_}, options);
      if (walks()) sharing.column_walks = at::zeros({inner_}, options);
    }
  }

  // Computes `of` for the rows from `begin` of one matrix; `z` are the statistics of B.
  void read(
      const MatrixView& rows, const double* row_sums, const double* z, int64_t batch, int64_t begin,
      OfA* of) {
    double dot[kMostRowsPerTask], square[kMostRowsPerTask];
    std::fill(square, square + rows.rows, 0.0);
    if (sharing_.dots.defined()) {
      const double* dots = sharing_.dots.const_data_ptr<double>() + begin;
      const bool known = sharing_.walks.defined();
      const double* walk = known ? sharing_.walks.const_data_ptr<double>() + begin : square;
      for (int64_t i = 0; i < rows.rows; ++i) of[i] = {dots[i], walk[i]};
      return;
    }
    const FastWeights encoded(row_sums, inner_, element_);
    const double* squares = square;
    if (encoder_) {
      encoder_->read(rows, batch, begin, encoded.view(), dot);
      squares = encoder_->squares(batch) + begin;
    } else if (sharing_.across) {
      cross(rows, encoded.view(), begin, dot);
    } else {
      RowSums out{dot, walks() ? square : nullptr};
      out.sample = true;
      reductions().rows(element_, Precision::fast, rows, encoded.view(), {}, out);
    }
    const double least = walks() ? reductions().smallest(z, inner_) : 0;
    for (int64_t i = 0; i < rows.rows; ++i) of[i] = {dot[i], walks() ? least * squares[i] : 0};
  }

  void finish() {
    if (encoder_) sharing_.of_a = encoder_->finish();
  }

 private:
  bool walks() const { return element_ == accumulator_of(element_); }

  void cross(const MatrixView& rows, const Weights& encoded, int64_t begin, double* dot) {
    const Narrow by_row(sharing_.across->row_sum, begin, rows.rows);
    const Narrow scale(sharing_.across->statistics, begin, rows.rows);
    std::vector<float> columns(static_cast<size_t>(inner_)), squares(walks() ? columns.size() : 0);
    reductions().cross(
        element_, rows,
        {encoded.narrow, by_row.values, dot, columns.data(), scale.values,
         walks() ? squares.data() : nullptr});
    const std::lock_guard<std::mutex> lock(mutex_);
    add(columns, sharing_.column_sums);
    if (walks()) add(squares, sharing_.column_walks);
  }

  // A range of entries, converted to fp32.
  struct Narrow {
    Narrow(const at::Tensor& wide, int64_t begin, int64_t count) {
      const double* from = wide.const_data_ptr<double>() + begin;
      std::transform(from, from + count, values, [](double w) { return static_cast<float>(w); });
    }
    float values[kMostRowsPerTask];
  };

  static void add(const std::vector<float>& part, const at::Tensor& to) {
    double* sums = to.data_ptr<double>();
    for (size_t j = 0; j < part.size(); ++j) sums[j] += part[j];
  }

  Sharing& sharing_;
  Element element_;
  int64_t inner_;
  std::optional<Encoder> encoder_;
  std::mutex mutex_;  // guards the column sums
};

// What the threshold of a row that exceeds it needs of one matrix B.
struct OfB {
  double common = 0;  // ‖Σ_k B_k‖² / K² without the part that is the same in every column
  std::vector<double> magnitudes;  // Σ_j |B_kj| of each row
};

// Reads B once, along its memory (`common_energy` in thresholds/rounding.py computes the same).
template <typename T>
OfB read_b(const MatrixView& b) {
  const bool by_row = b.col_stride == 1;
  const int64_t outer = by_row ? b.rows : b.cols, inner = by_row ? b.cols : b.rows;
  const int64_t outer_stride = by_row ? b.row_stride : b.col_stride;
  const int64_t inner_stride = by_row ? b.col_stride : b.row_stride;
  // Sums of the elements along one dimension, and of their magnitudes along the other.
  std::vector<double> sums(static_cast<size_t>(inner)), magnitudes(static_cast<size_t>(inner));
  std::vector<double> outer_sums(static_cast<size_t>(outer)), outer_magnitudes(outer_sums.size());
  constexpr int64_t kLanes = 8;
  for (int64_t i = 0; i < outer; ++i) {
    const T* row = static_cast<const T*>(b.data) + i * outer_stride;
    double sum[kLanes] = {}, magnitude[kLanes] = {};
    int64_t j = 0;
    for (; j + kLanes <= inner; j += kLanes) {
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const double value = static_cast<double>(row[(j + lane) * inner_stride]);
        const double size = std::abs(value);
        sum[lane] += value, magnitude[lane] += size;
        const size_t at = static_cast<size_t>(j + lane);
        sums[at] += value, magnitudes[at] += size;
      }
    }
    for (; j < inner; ++j) {
      const double value = static_cast<double>(row[j * inner_stride]);
      const double size = std::abs(value);
      sum[0] += value, magnitude[0] += size;
      sums[static_cast<size_t>(j)] += value, magnitudes[static_cast<size_t>(j)] += size;
    }
    outer_sums[static_cast<size_t>(i)] = std::accumulate(sum, sum + kLanes, 0.0);
    outer_magnitudes[static_cast<size_t>(i)] = std::accumulate(magnitude, magnitude + kLanes, 0.0);
  }
  const std::vector<double>& columns = by_row ? sums : outer_sums;
  const double mean =
      std::accumulate(columns.begin(), columns.end(), 0.0) / static_cast<double>(b.cols);
  double energy = 0;
  for (const double sum : columns) energy += (sum - mean) * (sum - mean);
  const double count = static_cast<double>(b.rows);
  return {energy / (count * count), by_row ? outer_magnitudes : magnitudes};
}

// Adds the squared partial sums of one row of A, as `prefix_energy` in thresholds/rounding.py does.
template <typename T>
double prefix_energy(const MatrixView& row, int64_t length) {
  double total = 0, before = 0, panel = 0;
  for (int64_t k = 0; k < row.cols; ++k) {
    panel += static_cast<const T*>(row.data)[k * row.col_stride];
    total += panel * panel;
    if ((k + 1) % length != 0 && k + 1 != row.cols) continue;
    before += panel;
    if (row.cols > length) total += before * before;
    panel = 0;
  }
  return total;
}

template <typename T>
double weighted_magnitude(const MatrixView& row, const std::vector<double>& weights) {
  double sum = 0;
  for (int64_t k = 0; k < row.cols; ++k) {
    sum += std::abs(static_cast<double>(static_cast<const T*>(row.data)[k * row.col_stride])) *
        weights[static_cast<size_t>(k)];
  }
  return sum;
}

// The verification of one product.
class Check {
 public:
  Check(const at::Tensor& c, const Problem& problem, const Encoding& encoding)
      : c_(prepared(c)),
        a_(prepared(problem.a)),
        b_(problem.b),
        encoding_(encoding),
        alpha_(problem.alpha),
        beta_(problem.beta),
        inner_(a_.size(2)),
        element_(element_of(c.scalar_type())),
        operand_(element_of(problem.a.scalar_type())),
        threshold_(element_, c_.size(1), inner_, c_.size(2), problem.alpha),
        of_b_(static_cast<size_t>(c_.size(0))) {
    const bool wide = element_ == Element::f64;
    const double extreme = kSettled * threshold_model().extreme_energy;
    least_energy_ = wide ? 0 : kLeastFast;
    most_energy_ = wide ? extreme : std::min(extreme, kMostFast);
    if (problem.addend.has_value() && beta_ != 0) {
      addend_ = reduce_addend(*problem.addend, c_);
      per_row_ = addend_.sum.size() != 1;
    }
    if (row_tolerances.is_set() && b_.defined()) {
      const auto options = c.options().dtype(at::kDouble);
      const at::Tensor written = at::empty({c_.size(0), c_.size(1)}, options);
      if (row_tolerances.call_if_set(problem, encoding, written)) tolerances_ = written;
    }
  }

  const MatrixBatch& c() const { return c_; }
  const MatrixBatch& a() const { return a_; }
  int64_t rows_per_task() const {
    return std::max(holdfast::rows_per_task(c_), holdfast::rows_per_task(a_));
  }

  struct Row {
    double residual, threshold, energy;
  };

  // Returns true if an element of the addend may have the magnitude of a mask.
  bool may_be_masked() const {
    return std::any_of(addend_.energy.begin(), addend_.energy.end(), [](double e) {
      return !(e < kLeastMask * kLeastMask);  // written so that a NaN counts
    });
  }

  // Checks a row in fp64 with the full threshold, or its tolerance if another threshold is in
  // force. What partial sums may drift is allowed for where the row exceeds the threshold without
  // it, or with `in_force` in any case.
  Row settle(int64_t batch, int64_t row, bool in_force = false) {
    const Weights signs = sign_weights(c_.size(2));
    double sum, energy, dot, walk;
    const auto reduce = reductions().rows;
    reduce(element_, Precision::wide, rows_of(c_, batch, row, row + 1), signs, {}, {&sum, &energy});
    Weights encoded;
    encoded.wide = row_sums(batch);
    encoded.scale = statistics(batch);
    const MatrixView of_a = rows_of(a_, batch, row, row + 1);
    reduce(operand_, Precision::wide, of_a, encoded, {}, {&dot, &walk});
    const double added = added_energy(batch, row);
    const double residual = sum - expected(batch, row, dot);
    if (tolerances_.defined()) return {residual, tolerance(batch, row), energy};
    Row settled{residual, threshold_(walk, energy, drift(batch), added), energy};
    const bool over = std::abs(residual) > settled.threshold;
    if ((over || in_force) && accumulates() && b_.defined()) {
      const double lifted = element_ == Element::f32
          ? structured<float>(batch, of_a, walk, energy, added)
          : structured<double>(batch, of_a, walk, energy, added);
      settled.threshold = std::max(settled.threshold, lifted);
    }
    return settled;
  }

  static bool suspect(const Row& row) {
    // Written so that a NaN on either side counts.
    return !(
        std::isfinite(row.threshold) && std::abs(row.residual) <= row.threshold &&
        row.energy <= threshold_model().extreme_energy);
  }

  // Finds the suspect rows from `begin` to `end`. The fast pass uses a lower bound of the full
  // threshold: rows within it are clean, and `settle` checks the others.
  void find(int64_t batch, int64_t begin, int64_t end, ReadingOfA& reading) {
    double sum[kMostRowsPerTask], energy[kMostRowsPerTask];
    OfA of_a[kMostRowsPerTask];
    RowSums of_c{sum, energy};
    of_c.sample = true;
    const Weights signs = sign_weights(c_.size(2));
    reductions().rows(element_, Precision::fast, rows_of(c_, batch, begin, end), signs, {}, of_c);
    const MatrixView rows = rows_of(a_, batch, begin, end);
    reading.read(rows, row_sums(batch), statistics(batch), batch, begin, of_a);
    if (tolerances_.defined()) return find_over_tolerance(batch, begin, end);
    if (!addend_.sum.empty()) {
      const double* added = addend_.sum.data();
      if (per_row_) added += batch * c_.size(1) + begin;
      for (int64_t i = 0; i < end - begin; ++i) sum[i] -= beta_ * added[per_row_ ? i : 0];
    }
    const double of_b = drift(batch);
    bool clean[kMostRowsPerTask], all = true;
    for (int64_t i = 0; i < end - begin; ++i) {
      const double residual = sum[i] - alpha_ * of_a[i].dot;
      clean[i] = threshold_.clears(residual, of_a[i].walk, energy[i], of_b) &
          (energy[i] >= least_energy_) & (energy[i] <= most_energy_);
      all &= clean[i];
    }
    for (int64_t i = 0; !all && i < end - begin; ++i) {
      if (clean[i]) continue;
      note_if_suspect(batch, begin + i, settle(batch, begin + i));
    }
  }

  int64_t suspects() const { return static_cast<int64_t>(suspects_.size()); }

  // Returns residual, threshold and energy of the suspect rows, and zeros for the others.
  at::Tensor verdict() const {
    const at::Tensor rows = at::zeros({3, c_.size(0), c_.size(1)}, at::kDouble);
    double* residual = rows.data_ptr<double>();
    const int64_t count = c_.size(0) * c_.size(1);
    for (const auto& [at, row] : suspects_) {
      residual[at] = row.residual;
      residual[count + at] = row.threshold;
      residual[2 * count + at] = row.energy;
    }
    return rows;
  }

 private:
  // Finds the suspect rows from `begin` to `end` in fp64, while another threshold is in force.
  void find_over_tolerance(int64_t batch, int64_t begin, int64_t end) {
    double sum[kMostRowsPerTask], energy[kMostRowsPerTask], dot[kMostRowsPerTask];
    const auto reduce = reductions().rows;
    const Weights signs = sign_weights(c_.size(2));
    const MatrixView rows = rows_of(c_, batch, begin, end);
    reduce(element_, Precision::wide, rows, signs, {}, {sum, energy});
    Weights encoded;
    encoded.wide = row_sums(batch);
    const MatrixView of_a = rows_of(a_, batch, begin, end);
    reduce(operand_, Precision::wide, of_a, encoded, {}, {dot, nullptr});
    for (int64_t i = 0; i < end - begin; ++i) {
      const int64_t row = begin + i;
      const double residual = sum[i] - expected(batch, row, dot[i]);
      note_if_suspect(batch, row, {residual, tolerance(batch, row), energy[i]});
    }
  }

  void note_if_suspect(int64_t batch, int64_t at, const Row& row) {
    if (!suspect(row)) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    suspects_.emplace_back(batch * c_.size(1) + at, row);
  }

  double tolerance(int64_t batch, int64_t row) const {
    return tolerances_.const_data_ptr<double>()[batch * c_.size(1) + row];
  }

  bool accumulates() const { return element_ == accumulator_of(element_); }

  // Computes the threshold of a row that allows for the drift of its partial sums which the mean
  // row of B causes, up to the bound if every rounding has its largest size and the same direction
  // (`row_bound` in thresholds/analytic.py).
  template <typename T>
  double structured(
      int64_t batch, const MatrixView& of_a, double walk, double energy, double added) {
    const OfB& of_b = read_once<T>(batch);
    const int64_t panel = threshold_model().panels[static_cast<size_t>(operand_)];
    const double common = of_b.common * prefix_energy<T>(of_a, panel);
    const double product = std::abs(alpha_) * weighted_magnitude<T>(of_a, of_b.magnitudes);
    const double drifting = threshold_(walk, energy, drift(batch), added, common);
    return std::min(drifting, threshold_.worst(product, added));
  }

  template <typename T>
  const OfB& read_once(int64_t batch) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& of_b = of_b_[static_cast<size_t>(batch)];
    if (!of_b) of_b = read_b<T>(rows_of(prepared(b_), batch, 0, inner_));
    return *of_b;
  }

  const double* row_sums(int64_t batch) const {
    return encoding_.row_sum.const_data_ptr<double>() + batch * inner_;
  }
  const double* statistics(int64_t batch) const {
    return encoding_.statistics.const_data_ptr<double>() + batch * (inner_ + 2);
  }
  double drift(int64_t batch) const { return statistics(batch)[inner_]; }
  double of_addend(const std::vector<double>& values, int64_t batch, int64_t row) const {
    if (values.empty()) return 0;
    return values[per_row_ ? static_cast<size_t>(batch * c_.size(1) + row) : 0];
  }
  double added_energy(int64_t batch, int64_t row) const {
    return beta_ * beta_ * of_addend(addend_.energy, batch, row);
  }
  double expected(int64_t batch, int64_t row, double dot) const {
    return alpha_ * dot + beta_ * of_addend(addend_.sum, batch, row);
  }

  MatrixBatch c_, a_;
  at::Tensor b_;
  const Encoding& encoding_;
  double alpha_, beta_;
  int64_t inner_;
  Element element_, operand_;
  Threshold threshold_;
  double least_energy_, most_energy_;  // limits for rows that the fast pass may clear
  Addend addend_;
  bool per_row_ = false;
  at::Tensor tolerances_;  // of the rows, fp64 [batch, M], if another threshold is in force
  std::mutex mutex_;  // guards the following
  std::vector<std::optional<OfB>> of_b_;  // what was computed on demand for each matrix of B
  std::vector<std::pair<int64_t, Row>> suspects_;  // those found so far, by batch · M + row
};

}  // namespace

bool supported(const at::Tensor& tensor) {
  const auto type = tensor.scalar_type();
  return type == at::kDouble || type == at::kFloat || type == at::kHalf || type == at::kBFloat16;
}

bool sums_columns(const at::Tensor& a) {
  return a.dim() == 2 && a.stride(1) == 1 && a.size(1) % kColumnStep == 0 &&
      a.scalar_type() != at::kDouble;
}

int64_t count_suspects(
    const at::Tensor& c, const Problem& problem, const Encoding& encoding, Sharing& sharing,
    at::Tensor* verdict) {
  Check check(c, problem, encoding);
  if (sharing.ask_mask && check.may_be_masked()) {
    sharing.least_mask = least_mask(problem);
    if (sharing.least_mask > 0) return 0;
  }
  ReadingOfA reading(check.a(), sharing);
  const int64_t per_row = check.c().size(2) + check.a().size(2);
  const int64_t rows_each = check.rows_per_task();
  for_row_blocks(check.c(), per_row, rows_each, [&](int64_t batch, int64_t begin, int64_t end) {
    check.find(batch, begin, end, reading);
  });
  reading.finish();
  if (verdict != nullptr && check.suspects() > 0) *verdict = check.verdict();
  return check.suspects();
}

at::Tensor verify(const at::Tensor& c, const Problem& problem, const Encoding& encoding) {
  Check check(c, problem, encoding);
  const int64_t batches = check.c().size(0), rows = check.c().size(1);
  at::Tensor result = at::empty({3, batches, rows}, c.options().dtype(at::kDouble));
  double* residual = result.data_ptr<double>();
  double* threshold = residual + batches * rows;
  double* energy = threshold + batches * rows;
  const int64_t per_row = check.c().size(2) + problem.a.size(-1);
  const int64_t rows_each = check.rows_per_task();
  for_row_blocks(check.c(), per_row, rows_each, [&](int64_t batch, int64_t begin, int64_t end) {
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
  const Check::Row first = Check(c, problem, encoding).settle(0, 0, true);
  const double rms = std::sqrt(first.energy / static_cast<double>(c.size(-1)));
  return rms > 0 && std::isfinite(rms) ? first.threshold / rms : 0;
}

}  // namespace holdfast
