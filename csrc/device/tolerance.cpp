#include "device/tolerance.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>

#include "core/reduce.h"
#include "core/threshold.h"

namespace holdfast::device {

namespace {

constexpr double kStepBytes = 32;  // bytes of an operand's row in one step of a matrix unit
constexpr double kFloat8Rounding = 0x1p-11;  // _FLOAT8_ROUNDING in Python

// The relative error from rounding both fp32 operands before they are multiplied.
double operand_rounding(Precision precision) {
  switch (precision) {
    case Precision::ieee:
    case Precision::fast: return 0;
    case Precision::tf32x3: return 0x1p-21;
    default: return 0x1p-10;
  }
}

Format format_of(c10::ScalarType type) {
  switch (type) {
    case c10::ScalarType::Double: return holdfast::format_of(Element::f64);
    case c10::ScalarType::Float: return holdfast::format_of(Element::f32);
    case c10::ScalarType::Half: return holdfast::format_of(Element::f16);
    case c10::ScalarType::BFloat16: return holdfast::format_of(Element::bf16);
    default: TORCH_CHECK(false, "holdfast: no rounding model for an output of ", type);
  }
}

// Returns the bound on what underflow costs an element of C (thresholds/rounding.py, underflow).
double underflow(double inner, const Format& out, const Format& accumulator) {
  const double least = std::max(accumulator.smallest_normal, 0x1p-511 * accumulator.eps);
  return (inner + 2) * least + out.smallest_normal * out.eps;
}

}  // namespace

bool is_float8(c10::ScalarType type) {
  return type == c10::ScalarType::Float8_e4m3fn || type == c10::ScalarType::Float8_e5m2;
}

Tolerance Tolerance::of(
    c10::ScalarType operand, c10::ScalarType output, int64_t inner_size, int64_t columns,
    Precision precision) {
  const ThresholdModel& model = threshold_model();
  const double inner = static_cast<double>(inner_size);
  const bool wide = operand == c10::ScalarType::Double;
  const bool single = operand == c10::ScalarType::Float;
  const bool scalar = wide || (single && precision == Precision::ieee);
  const Format accumulator = holdfast::format_of(wide ? Element::f64 : Element::f32);
  const Format stored = format_of(output);
  const double unit = accumulator.eps / 2;
  const double sigmas = model.accumulation_sigmas / model.output_sigmas * unit;
  const double random = sigmas * std::sqrt((inner / 2 + model.check_steps) / 6);
  const double ended = sigmas * std::sqrt((inner / 3 + model.check_steps + 1) / 6);
  const bool rounds = c10::elementSize(output) < 4;
  const double floor = model.output_sigmas * std::sqrt(static_cast<double>(columns)) *
      underflow(inner, stored, accumulator);
  const double half = rounds ? stored.eps / 2 : 0.0;
  const double kept = std::sqrt(ended * ended + half * half);  // std::hypot would need glibc 2.35
  const double scale = model.output_sigmas;
  const double cut = single ? operand_rounding(precision) : 0;
  const double bytes = static_cast<double>(c10::elementSize(operand));
  const double steps = scalar ? 0 : inner * bytes / kStepBytes;
  double coherent = cut + random + unit * inner / 3;
  double walk = cut + random + unit * steps;
  if (is_float8(operand)) {
    // Sums that stay in the matrix unit are truncated in each step.
    walk = kFloat8Rounding * (precision == Precision::fast ? std::max(1.0, steps) : 1);
    coherent = walk;
  }
  // Sums for narrow operands are fp32, in which squares of values below 2⁻⁶³ underflow.
  const double lost = bytes > 2 ? 0
                                : scale * 0x1p-63 *
          (kept * std::sqrt(static_cast<double>(columns)) + walk * std::sqrt(inner));
  return {scale, kept, walk, coherent, floor + lost};
}

DriftGrowth DriftGrowth::of(int64_t inner_size) {
  const double inner = static_cast<double>(inner_size);
  const double walk = inner / 2 + threshold_model().check_steps;
  return {inner * (inner / 3) / walk, inner * (inner * inner / 4) / walk};
}

}  // namespace holdfast::device
