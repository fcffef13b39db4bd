// The rounding threshold of thresholds/rounding.py, for sums that are built tile by tile.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/threshold.h"

namespace holdfast {

// How the squares of the partial sums of `inner` products add up, if chains of `panel` products are
// summed first.
template <typename T>
struct Chain {
  Chain(int64_t inner, int64_t panel_length) {
    const double n = static_cast<double>(std::max<int64_t>(inner, 1));
    const double panel = std::min(n, static_cast<double>(std::max<int64_t>(panel_length, 1)));
    const double panels = std::ceil(n / panel);
    const double steps_of_check = kCheckSteps * threshold_model().check_steps;
    steps = panel + panels;
    walk = steps / 2 + steps_of_check;
    drift = (panel * panel / n + panels) / 3 + steps_of_check;
    repeated = steps * steps / 4 + steps_of_check;
  }
  // Returns h for products of which a share repeat their predecessor.
  double growth(double share) const { return drift + share * share * (repeated - drift); }
  // The checks round as well: with fp64 they have half as many lanes, so longer sums.
  static constexpr double kCheckSteps = sizeof(T) == sizeof(double) ? 3 : 1;
  double walk, drift, repeated, steps;
};

template <typename T>
class TileBound {
 public:
  TileBound(int64_t inner, int64_t columns) : inner_(inner), columns_(columns) {
    const double unit = std::numeric_limits<T>::epsilon() / 2;
    const double sigmas = threshold_model().accumulation_sigmas * unit;
    factor_ = sigmas / std::sqrt(6.0);
    floor_ = threshold_model().output_sigmas * std::sqrt(static_cast<double>(columns)) *
        static_cast<double>(inner + 2) * std::numeric_limits<T>::min();
  }

  // `spread` is at least Σ_k A_ik² z_k, `growth` is h, and `energy` is ‖C_i‖².
  double operator()(double spread, double growth, double energy) const {
    return factor_ * std::sqrt(spread + (growth + 1) * (energy + lost())) + floor_;
  }
  double without_energy(double spread) const { return factor_ * std::sqrt(spread) + floor_; }

  // Returns a bound that rounding cannot exceed. It takes every rounding at its worst, and bounds
  // the magnitudes of the products, whose squares sum to `squares`, by the Cauchy–Schwarz
  // inequality.
  double worst(double steps, double squares, double energy) const {
    const double unit = std::numeric_limits<T>::epsilon() / 2;
    const double products = static_cast<double>(inner_) * static_cast<double>(columns_);
    const double magnitude = std::sqrt(products * squares) +
        std::sqrt(static_cast<double>(columns_) * (energy + lost()));
    return 2 * std::expm1((steps + 32) * unit) * magnitude + floor_;
  }

 private:
  // What the energy may lack because squares underflow.
  double lost() const { return static_cast<double>(columns_) * std::numeric_limits<T>::min(); }

  int64_t inner_, columns_;
  double factor_, floor_;
};

}  // namespace holdfast
