// The arguments of torch's scaled and grouped products, as a problem that can be verified.
#pragma once

#include <ATen/core/ivalue.h>

#include "core/product.h"

namespace holdfast::device {

// Reads what follows the operands among the arguments of a product. Returns why it cannot be
// verified, which is empty if it can.
using Reader = const char* (*)(c10::ArrayRef<c10::IValue> arguments, Problem& problem);

// aten::_scaled_mm: fp8 operands with scales of fp32, one each or one of each row and column. An
// output of fp8 is refused, and so are scales of blocks.
const char* read_scaled(c10::ArrayRef<c10::IValue> arguments, Problem& problem);
// aten::_scaled_mm_v2, with scales as of _scaled_mm.
const char* read_recipes(c10::ArrayRef<c10::IValue> arguments, Problem& problem);
// aten::_grouped_mm, except for groups of B's columns (A [groups, M, K], B [K, N]).
const char* read_grouped(c10::ArrayRef<c10::IValue> arguments, Problem& problem);

}  // namespace holdfast::device
