// Products whose addend masks elements (abft/gemm/masked.py says how they are verified).
#pragma once

#include "core/product.h"

namespace holdfast {

constexpr double kLeastMask = 4096;  // LEAST in abft/gemm/masked.py

// Returns true if an addend holds INF, or finite values that mask elements.
bool masked(const Problem& problem);

Problem without_mask(const Problem& problem);  // with 0 in place of what masks

// Returns how many rows of C contradict the unmasked product with the mask put in.
int64_t rows_that_contradict(
    const at::Tensor& c, const at::Tensor& unmasked, const Problem& problem);

}  // namespace holdfast
