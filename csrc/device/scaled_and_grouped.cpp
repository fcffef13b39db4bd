#include "device/scaled_and_grouped.h"

#include "device/tolerance.h"

namespace holdfast::device {

namespace {

using Values = c10::ArrayRef<c10::IValue>;

// Returns true for one scale, or one of each row (dimension 0) or column (1) of an operand.
bool covers(const at::Tensor& scale, int64_t dimension, const at::Tensor& operand) {
  if (scale.scalar_type() != at::kFloat || scale.device() != operand.device()) return false;
  const int64_t count = operand.size(dimension);
  const bool each =
      scale.dim() == 2 && scale.size(dimension) == count && scale.size(1 - dimension) == 1;
  return scale.numel() == 1 || each;
}

c10::ScalarType scaled_output(Values arguments, const at::Tensor& a) {
  if (arguments.size() > 8) return arguments[8].toTensor().scalar_type();
  return arguments[6].isNone() ? a.scalar_type() : arguments[6].toScalarType();
}

}  // namespace

const char* read_scaled(Values arguments, Problem& p) {
  p.row_scale = arguments[2].toTensor(), p.column_scale = arguments[3].toTensor();
  if (!arguments[4].isNone()) p.addend = arguments[4].toTensor();
  p.fast_sums = arguments[7].toBool();
  if (!is_float8(p.a.scalar_type()) || !is_float8(p.b.scalar_type())) {
    return "its operands are not of float8_e4m3fn or float8_e5m2";
  }
  if (c10::elementSize(scaled_output(arguments, p.a)) == 1) return "its output is rounded to fp8";
  if (!arguments[5].isNone()) return "its result is scaled";
  const bool known = p.a.dim() == 2 && p.b.dim() == 2 && covers(p.row_scale, 0, p.a) &&
      covers(p.column_scale, 1, p.b);
  return known ? "" : "its scales are not fp32 of whole rows and columns, on its device";
}

const char* refuse_recipes(Values, Problem&) {
  return "it was called as _scaled_mm_v2, whose scales are not read";
}

const char* read_grouped(Values arguments, Problem& p) {
  if (!arguments[3].isNone()) return "it has a bias of each group";
  if (arguments[2].isNone()) return "";
  if (p.a.dim() != 2) return "its groups are of columns of its right operand";
  p.ends = arguments[2].toTensor();
  const bool known =
      p.ends.scalar_type() == at::kInt && p.ends.dim() == 1 && p.ends.is_contiguous();
  return known ? "" : "its offsets are not contiguous int32";
}

}  // namespace holdfast::device
