// The bound on the rounding error of a product that a device computed, for one accumulator
// (abft/triton/tolerance.py computes the same).
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

namespace holdfast::device {

// How precisely products of fp32 operands are computed, or `fast` for sums of fp8 products that are
// not added into fp32 before they are complete.
enum class Precision : uint8_t { ieee, tf32x3, tf32, fast };

bool is_float8(c10::ScalarType type);  // of those that have a tolerance

// Factors of the largest signed row residual that rounding causes (backend.h has the formula).
struct Tolerance {
  // The floor of fp64 products is below the range of fp32.
  double scale = 0, output = 0, walk = 0, drift = 0, floor = 0;
  static Tolerance of(
      c10::ScalarType operand, c10::ScalarType output, int64_t inner, int64_t columns,
      Precision precision);
};

// The ratio g of the squared errors of K drifting terms to those of a random walk: for terms of
// one sign with independent roundings, and for equal terms (`drift_growth` in Python).
struct DriftGrowth {
  double drifting = 0, repeating = 0;
  static DriftGrowth of(int64_t inner);
};

}  // namespace holdfast::device
