#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <cmath>
#include <limits>

#include "core/checksum_weights.h"
#include "core/threshold.h"
#include "device/backend.h"

namespace holdfast::device {

namespace {

using at::Tensor;

Tensor batched(const Tensor& t) { return t.dim() == 3 ? t : t.unsqueeze(0); }
Tensor wide(const Tensor& t) { return batched(t).to(at::kDouble); }

at::ScalarType sums_type(const Tensor& operand) {
  const auto type = operand.scalar_type();
  return type == at::kDouble || type == at::kFloat ? at::kDouble : at::kFloat;
}

Tensor signs_on(int64_t count, const at::Device& device) {
  auto* table = const_cast<double*>(sign_weights(count).wide);  // it is only read
  return at::from_blob(table, {count}, at::kDouble).clone().to(device);
}

// Marks both rows of each pair (0, 1), (2, 3), … whose values are equal.
Tensor equals_neighbour(const Tensor& values) {
  const int64_t even = values.size(1) / 2 * 2;
  const Tensor pairs = values.narrow(1, 0, even).unflatten(1, {even / 2, 2});
  const Tensor same = pairs.select(2, 0).eq(pairs.select(2, 1));
  Tensor marked = at::zeros_like(values, at::kBool);
  marked.narrow(1, 0, even).copy_(same.repeat_interleave(2, 1));
  return marked;
}

// Returns the sums of `values` times `by` along the last dimension. They are added up in pairs, as
// the kernels do and the thresholds allow for, and not one after the other as in a product.
Tensor sums_of(const Tensor& values, const Tensor& by) { return (values * by).sum(-1); }

Encoding encoded(const Tensor& rows) {
  const Tensor b = wide(rows);
  const DriftGrowth growth = DriftGrowth::of(b.size(1));
  const Tensor plain = b.sum(-1), squares = b.square().sum(-1);
  const Tensor same = equals_neighbour(plain).logical_and_(equals_neighbour(squares));
  const Tensor beyond =
      (plain.square() - threshold_model().mean_noise * squares).clamp_min(0) / b.size(2);
  const Tensor factor = at::where(
      same, at::scalar_tensor(growth.repeating, beyond.options()),
      at::scalar_tensor(growth.drifting, beyond.options()));
  const auto type = sums_type(rows);
  return {
      sums_of(b, signs_on(b.size(2), b.device())).to(type), (squares + factor * beyond).to(type)};
}

class AtenBackend : public Backend {
 public:
  const char* obstacle(const Problem& problem) const override {
    return supported(problem.a) ? "" : "dtype has no rounding threshold";
  }

  Encoding encode(const Tensor& b) override {
    const c10::NoGradGuard no_grad;
    return encoded(b);
  }

  void judge(const Judged& judged, Sharing& sharing) override {
    const c10::NoGradGuard no_grad;
    const Tensor a = wide(judged.problem.a);
    const auto [residual, threshold] = rows_of(judged, a, sharing);
    raise(judged.slot, residual.abs(), threshold);
    share(a, judged.problem.a, sharing);
  }

  // Returns D and T of every row, fp64 [batch, M].
  static std::pair<Tensor, Tensor> rows_of(
      const Judged& judged, const Tensor& a, const Sharing& sharing) {
    const Problem& p = judged.problem;
    const Tensor c = wide(judged.c), addend = added(judged, c), product = c - addend;
    const Tensor sums = sums_of(product, signs_on(c.size(2), c.device()));
    const auto [dots, walks] = predicted(judged, a, sharing);
    const Tensor walk = walks * (p.alpha * p.alpha) + 2 * addend.square().sum(-1);
    const Tolerance& t = judged.tolerance;
    const Tensor squared = t.output * t.output * c.square().sum(-1) + t.walk * t.walk * walk +
        t.drift * t.drift * (product.square().sum(-1) - 4 * walk).clamp_min(0);
    return {sums - p.alpha * dots, t.scale * squared.sqrt() + t.floor};
  }

 private:
  static Tensor added(const Judged& judged, const Tensor& c) {
    const Problem& p = judged.problem;
    if (!p.addend || p.beta == 0) return at::zeros({1, 1, 1}, c.options()).expand_as(c);
    return (p.beta * p.addend->expand(judged.c.sizes()).to(at::kDouble)).reshape(c.sizes());
  }

  static std::pair<Tensor, Tensor> predicted(
      const Judged& judged, const Tensor& a, const Sharing& sharing) {
    if (sharing.dots.defined()) {
      return {sharing.dots.unsqueeze(0), sharing.walks.unsqueeze(0)};
    }
    const auto times = [&](const Tensor& rows, const Tensor& by) {
      return sums_of(rows, by.to(at::kDouble).unsqueeze(1));
    };
    return {times(a, judged.encoding.row_sum), times(a.square(), judged.encoding.statistics)};
  }

  static void raise(const Tensor& slot, const Tensor& residual, const Tensor& threshold) {
    constexpr double infinite = std::numeric_limits<double>::infinity();
    const Tensor judged = threshold.isfinite().logical_and(residual.isfinite());
    const Tensor ratio = (residual / threshold).masked_fill(judged.logical_not(), infinite);
    const Tensor bits = ratio.max().to(at::kFloat).view(at::kInt);
    slot.copy_(at::maximum(slot, bits));
  }

  static void share(const Tensor& a, const Tensor& operand, Sharing& sharing) {
    if (sharing.encode_a) sharing.of_a = encoded(operand);
    if (!sharing.across) return;
    const auto of_columns = [&](const Tensor& values, const Tensor& by) {
      return sums_of(values[0].t(), by.to(at::kDouble));
    };
    sharing.column_sums = of_columns(a, sharing.across->row_sum);
    sharing.column_walks = of_columns(a.square(), sharing.across->statistics);
  }
};

}  // namespace

Tensor row_thresholds(const Judged& judged) {
  const c10::NoGradGuard no_grad;
  return AtenBackend::rows_of(judged, wide(judged.problem.a), {}).second;
}

Backend& aten_backend() {
  static auto& backend = *new AtenBackend;
  return backend;
}

}  // namespace holdfast::device
