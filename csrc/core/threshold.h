// The rounding threshold of one product, which thresholds/rounding.py derives.
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "core/reduce.h"

namespace holdfast {

// The constants of the rounding threshold. Python sets them before the first product is verified
// (configured_core in abft/gemm/cpu.py) and documents where they come from.
struct ThresholdModel {
  double output_sigmas = 0, accumulation_sigmas = 0;
  std::array<int64_t, 4> panels = {1, 1, 1, 1};  // In the order of Element.
  int64_t narrow = 1;
  double check_steps = 0, mean_noise = 0;
  double extreme_energy = 0;  // A row of C with a larger Σ C² is always suspect.
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

// How the squares of the partial sums of K products add up, in units of the square of the last one.
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
      : alpha_(alpha), inner_(static_cast<double>(inner)), columns_(static_cast<double>(columns)) {
    const ThresholdModel& model = threshold_model();
    const Format out = format_of(element), acc = format_of(accumulator_of(element));
    const bool rounds = element != accumulator_of(element);
    // Deviations are in units of the accumulator's eps. Its square would move small energies below
    // the range of fp64.
    unit_ = acc.eps;
    const double output = rounds ? model.output_sigmas * out.eps / 2 / unit_ : 0;
    const double accumulation = model.accumulation_sigmas / 2;
    output_ = output * output;
    accumulation_ = accumulation * accumulation / 6;
    const Growth growth(inner, element);
    steps_ = growth.steps;
    // All K products of a narrow matrix may be one chain (rounding.py, unbroken).
    if (rows < model.narrow || columns < model.narrow) {
      const Growth chain(inner, inner);
      accumulation_ *= std::max(
          {chain.walk / growth.walk, chain.ended / growth.ended, chain.steps / growth.steps});
    }
    // The squares of smaller values underflow.
    const double least = std::max(acc.smallest_normal, 0x1p-511 * acc.eps);
    lost_ = std::max(1.0, std::abs(alpha)) * static_cast<double>(inner + 2) * least +
        out.smallest_normal * out.eps;
    floor_ = model.output_sigmas * std::sqrt(columns_) * lost_;
  }

  // Returns the threshold, which grows with each argument: `walk` is Σ_k A_ik² z_k, `energy`
  // ‖C_i‖², `drift` h, `added` beta² ‖addend‖², and `common` the energy that the rows of B have in
  // common times the prefix energy of the row of A.
  double operator()(
      double walk, double energy, double drift, double added, double common = 0) const {
    return unit_ * std::sqrt(squared(walk + 2 * common, energy, drift, added)) + floor_;
  }

  // Returns the bound that rounding cannot exceed, for a row whose products have the sum of
  // magnitudes `product`, and its addend the energy `added`. For dtypes that accumulate in
  // themselves.
  double worst(double product, double added) const {
    const double computed = 2 * std::expm1((inner_ + 2) * unit_ / 2);
    const double checked = std::expm1((inner_ + 2 * columns_ + 2) * 0x1p-53);
    const double magnitude = product + std::sqrt(columns_ * added);
    return (computed + checked * (1 + computed)) * magnitude + 2 * columns_ * lost_;
  }

  // Returns whether a residual is within the threshold of a row without an addend; false if one of
  // them is NaN or infinite. It takes no square root, as it is called for every row.
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

  double alpha_, inner_, columns_;
  double unit_ = 0, output_ = 0, accumulation_ = 0, steps_ = 0, lost_ = 0, floor_ = 0;
};

}  // namespace holdfast
