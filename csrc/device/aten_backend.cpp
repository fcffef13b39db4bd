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

// The factors of rows or columns, fp64 [1, count] or [1, 1].
Tensor factors(const Tensor& scale) { return scale.to(at::kDouble).reshape({1, -1}); }

// Returns the group of each of `count` rows or columns, as a number behind the last where none is.
Tensor group_of_each(const Tensor& ends, int64_t count) {
  return at::searchsorted(
      ends, at::arange(count, ends.options()), /*out_int32=*/false, /*right=*/true);
}

// Marks for each group the rows or columns that are not in it, [groups, count].
Tensor others(const Tensor& ends, int64_t count) {
  const Tensor groups = at::arange(ends.numel(), ends.options()).unsqueeze(1);
  return groups.ne(group_of_each(ends, count));
}

Encoding encoded(const Tensor& rows, const Tensor& column_scale) {
  Tensor b = wide(rows);
  if (column_scale.defined()) b = b * factors(column_scale);
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
    const bool known = supported(problem.a) || is_float8(problem.a.scalar_type());
    return known ? "" : "dtype has no rounding threshold";
  }

  EncodedTwice encode_twice(const Tensor& b, const Tensor& column_scale) override {
    const c10::NoGradGuard no_grad;
    const Encoding encoding = encoded(b, column_scale);
    return {encoding, {encoding.row_sum.clone(), encoding.statistics.clone()}};
  }

  std::pair<EncodedTwice, EncodedTwice> encode_both(const Tensor& b) override {
    return {encode_twice(b, {}), encode_twice(b.t(), {})};
  }

  void judge(const Judged& judged, Sharing& sharing) override {
    const c10::NoGradGuard no_grad;
    const Tensor a = wide(judged.problem.a);
    const Rows rows = rows_of(judged, a, sharing);
    raise(judged, rows);
    share(a, judged.problem.a, sharing);
  }

  // D and T of every row, fp64 [batch, M], its prediction, and W.
  struct Rows {
    Tensor residual, threshold, predicted, walk;
  };
  static Rows rows_of(const Judged& judged, const Tensor& a, const Sharing& sharing) {
    const Problem& p = judged.problem;
    const Tensor c = wide(judged.c), addend = added(judged, c), product = c - addend;
    const Tensor sums = sums_of(product, signs_on(c.size(2), c.device()));
    const auto [dots, walks] = predicted(judged, a, sharing);
    Tensor factor = at::scalar_tensor(p.alpha, c.options());
    if (p.row_scale.defined()) factor = factor * factors(p.row_scale);
    const Tensor extra = addend.square().sum(-1);
    const Tensor walk = walks * factor.square() + 2 * extra;
    const Tolerance& t = judged.tolerance;
    const Tensor squared = t.output * t.output * c.square().sum(-1) + t.walk * t.walk * walk +
        t.drift * t.drift * (product.square().sum(-1) - 4 * walk).clamp_min(0);
    Rows rows{sums - factor * dots, t.scale * squared.sqrt() + t.floor, factor * dots, walk};
    Tensor unjudged = extra.isinf();  // a mask, beside which nothing can be predicted
    if (p.ends.defined() && !divides_inner(judged)) {
      const Tensor in_none = group_of_each(p.ends, c.size(1)).eq(p.ends.numel());
      unjudged = unjudged.logical_or(in_none);
    }
    rows.residual = rows.residual.masked_fill(unjudged, 0);
    rows.threshold = rows.threshold.masked_fill(unjudged, 1);
    return rows;
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
    const auto& [row_sum, statistics] = judged.encoding;
    if (!judged.problem.ends.defined()) return {times(a, row_sum), times(a.square(), statistics)};
    return {by_groups(judged, a[0], row_sum), by_groups(judged, a[0].square(), statistics)};
  }

  // Returns Σ_k rows_ik by_gk, fp64 [1, M] with g the group of row i, or [groups, M] with the sum
  // over the members of g.
  static Tensor by_groups(const Judged& judged, const Tensor& rows, const Tensor& by) {
    const Tensor wide = by.to(at::kDouble);
    const Tensor& ends = judged.problem.ends;
    if (divides_inner(judged)) {
      return wide.masked_fill(others(ends, wide.size(1)), 0).matmul(rows.t());
    }
    const Tensor all = wide.matmul(rows.t());  // [groups, M]
    return all.masked_fill(others(ends, rows.size(0)), 0).sum(0, /*keepdim=*/true);
  }

  static void raise(const Judged& judged, const Rows& rows) {
    constexpr int kInfinite = 0x7f800000, kImpossible = 0x7fc00000;  // bits of INF and of NaN
    const Tensor unjudged =
        rows.threshold.isfinite().logical_and(rows.residual.isfinite()).logical_not();
    const Tensor impossible =
        unjudged.logical_and(rows.predicted.isfinite()).logical_and(holds(judged, rows.walk));
    const double most = std::numeric_limits<float>::max();
    const Tensor ratio = (rows.residual.abs() / rows.threshold).clamp_max(most).to(at::kFloat);
    const Tensor bits =
        ratio.view(at::kInt).masked_fill(unjudged, kInfinite).masked_fill(impossible, kImpossible);
    judged.slot.copy_(at::maximum(judged.slot, bits.max()));
  }

  // Marks rows whose elements and their squares the formats hold, as each is at most √(K W).
  static Tensor holds(const Judged& judged, const Tensor& walk) {
    const Tensor element = 4 * walk * judged.problem.a.size(-1);
    const auto type = judged.c.scalar_type();
    if (type == at::kHalf) return element.lt(65504.0 * 65504.0);
    if (type != at::kDouble) return element.lt(0x1.fffffep127 * 0x1.fffffep127);
    return (element * judged.c.size(-1)).lt(std::numeric_limits<double>::max());
  }

  static void keep(const Encoding& made, Sharing& sharing) {
    sharing.encoded = true;
    if (!sharing.of_a.row_sum.defined()) return static_cast<void>(sharing.of_a = made);
    sharing.of_a.row_sum.copy_(made.row_sum);
    sharing.of_a.statistics.copy_(made.statistics);
  }

  static void share(const Tensor& a, const Tensor& operand, Sharing& sharing) {
    if (sharing.encode_a) keep(encoded(operand, {}), sharing);
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
  return AtenBackend::rows_of(judged, wide(judged.problem.a), {}).threshold;
}

Backend& aten_backend() {
  static auto& backend = *new AtenBackend;
  return backend;
}

}  // namespace holdfast::device
