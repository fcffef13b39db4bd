#include "device/scaled_and_grouped.h"

#include <algorithm>

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

// Reads the arguments of both ops from the given places on. `out` is that of an output to write.
const char* read(
    Values arguments, size_t bias, size_t dtype, size_t fast, const at::Tensor& row_scale,
    const at::Tensor& column_scale, Problem& p) {
  p.row_scale = row_scale, p.column_scale = column_scale;
  if (!arguments[bias].isNone()) p.addend = arguments[bias].toTensor();
  p.fast_sums = arguments[fast].toBool();
  if (!is_float8(p.a.scalar_type()) || !is_float8(p.b.scalar_type())) {
    return "its operands are not of float8_e4m3fn or float8_e5m2";
  }
  auto output = arguments[dtype].isNone() ? p.a.scalar_type() : arguments[dtype].toScalarType();
  if (arguments.size() > fast + 1) output = arguments[fast + 1].toTensor().scalar_type();
  if (c10::elementSize(output) == 1) return "its output is rounded to fp8";
  const bool known = p.a.dim() == 2 && p.b.dim() == 2 && covers(p.row_scale, 0, p.a) &&
      covers(p.column_scale, 1, p.b);
  return known ? "" : "its scales are not fp32 of whole rows and columns, on its device";
}

// Returns the scale of an operand, whose scales, recipes and swizzles begin at `first`; undefined
// if it is not one of the whole operand or of its rows.
at::Tensor only_scale(Values arguments, size_t first) {
  const auto scales = arguments[first].toTensorVector();
  const auto recipes = arguments[first + 1].toIntVector();
  const auto swizzles = arguments[first + 2].toIntVector();
  constexpr int64_t kRowWise = 1;  // at::blas::ScalingType, after TensorWise
  const bool swizzled =
      std::any_of(swizzles.begin(), swizzles.end(), [](int64_t each) { return each != 0; });
  const bool known = scales.size() == 1 && recipes.size() == 1 && recipes[0] <= kRowWise;
  return known && !swizzled ? scales[0] : at::Tensor();
}

}  // namespace

const char* read_scaled(Values arguments, Problem& p) {
  const char* obstacle =
      read(arguments, 4, 6, 7, arguments[2].toTensor(), arguments[3].toTensor(), p);
  return *obstacle == '\0' && !arguments[5].isNone() ? "its result is scaled" : obstacle;
}

const char* read_recipes(Values arguments, Problem& p) {
  const at::Tensor row_scale = only_scale(arguments, 2), column_scale = only_scale(arguments, 5);
  if (!row_scale.defined() || !column_scale.defined()) {
    return "its scales are not those of whole operands, or of rows and columns";
  }
  if (!arguments[10].toIntVector().empty()) return "it names the dimensions to be contracted";
  return read(arguments, 8, 9, 11, row_scale, column_scale, p);
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
