// The rounding threshold (thresholds/rounding.py) for one product.
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "core/reduce.h"

namespace holdfast {

// The constants of the rounding threshold. Python, where their source is documented, sets them once
// before the first product is judged (ops/gemm/passes.py, configure).
struct ThresholdModel {
  double output_sigmas = 0, accumulation_sigmas = 0;
  std::array<int64_t, 4> panels = {1, 1, 1, 1};  // by Element
  int64_t narrow = 1;
  double check_steps = 0, mean_noise = 0;
  double extreme_energy = 0;  // rows of C with more Σ C² are suspect whatever their residual
  bool configured() const { return extreme_energy > 0; }
};

inline ThresholdModel configured_threshold_model;

inline const ThresholdModel& threshold_model() {
  TORCH_CHECK(
      configured_threshold_model.configured(),
      "holdfast: the rounding threshold has no constants yet: call configure() first");
  return configured_threshold_model;
}

struct Format {
  double eps, smallest_normal;
};

inline Format format_of(Element element) {
  switch (element) {
    case Element::f64: return {0x1p-52, 0x1p-1022};
    case Element::f32: return {0x1p-23, 0x1p-126};
    case Element::f16: return {0x1p-10, 0x1p-14};
    default: return {0x1p-7, 0x1p-126};
  }
}

inline Element accumulator_of(Element element) {
  return element == Element::f64 ? Element::f64 : Element::f32;
}

// How squared partial sums of K products add up, in units of the last one squared.
struct Growth {
  Growth(int64_t inner, Element element)
      : Growth(inner, threshold_model().panels[static_cast<size_t>(element)]) {}
  Growth(int64_t inner, int64_t length) {
    const ThresholdModel& model = threshold_model();
    const double panel = static_cast<double>(std::min(inner, length));
    const double panels = static_cast<double>((inner + length - 1) / length);
    walk = (panel + panels) / 2 + model.check_steps;
    drift = (panel * panel / static_cast<double>(inner) + panels) / 3;
    repeated = (panel + panels) * (panel + panels) / 4;
    ended = drift + model.check_steps;
    steps = panel + panels;
  }
  double walk, drift, repeated, ended, steps;
};

class Threshold {
 public:
  Threshold(Element element, int64_t rows, int64_t inner, int64_t columns, double alpha)
      : alpha_(alpha) {
    const ThresholdModel& model = threshold_model();
    const Format out = format_of(element), acc = format_of(accumulator_of(element));
    const bool rounds = element != accumulator_of(element);
    // In units of the accumulator's eps, whose square would take small energies below fp64's range.
    unit_ = acc.eps;
    const double output = rounds ? model.output_sigmas * out.eps / 2 / unit_ : 0;
    const double accumulation = model.accumulation_sigmas / 2;
    output_ = output * output;
    accumulation_ = accumulation * accumulation / 6;
    const Growth growth(inner, element);
    steps_ = growth.steps;
    if (rows < model.narrow || columns < model.narrow) {  // one chain (rounding.py, unbroken)
      const Growth chain(inner, inner);
      accumulation_ *= std::max(
          {chain.walk / growth.walk, chain.ended / growth.ended, chain.steps / growth.steps});
    }
    const double least = std::max(acc.smallest_normal, 0x1p-511 * acc.eps);  // squares underflow
    const double lost = std::max(1.0, std::abs(alpha)) * static_cast<double>(inner + 2) * least +
        out.smallest_normal * out.eps;
    floor_ = model.output_sigmas * std::sqrt(static_cast<double>(columns)) * lost;
  }

  // walk: Σ_k A_ik² z_k; drift: h; added: beta² ‖addend‖²; common: what the rows of B have in
  // common, times the row's prefix energy. Grows with each of them.
  double operator()(
      double walk, double energy, double drift, double added, double common = 0) const {
    return unit_ * std::sqrt(squared(walk + 2 * common, energy, drift, added)) + floor_;
  }

  // Whether a residual is within the threshold of a row without an addend: for many rows, without a
  // root. Not where either is NaN or infinite.
  bool clears(double residual, double walk, double energy, double drift) const {
    const double line = squared(walk, energy, drift, 0), beyond = std::abs(residual) - floor_;
    const double units = beyond < 0 ? 0 : beyond / unit_;
    return units * units <= line && line <= std::numeric_limits<double>::max();
  }

 private:
  double squared(double walk, double energy, double drift, double added) const {
    const double partial = alpha_ * alpha_ * walk + (drift + 1) * energy + steps_ * added;
    return output_ * energy + accumulation_ * partial;
  }

  double alpha_, unit_ = 0, output_ = 0, accumulation_ = 0, steps_ = 0, floor_ = 0;
};

}  // namespace holdfast
