// Products whose addend masks elements (abft/gemm/masked.py says how they are verified).
#pragma once

#include "core/product.h"

namespace holdfast {

constexpr double kLeastMask = 4096;  // LEAST in abft/gemm/masked.py

// Returns the magnitude from which elements of the addend mask, INF if no finite one does. It is 0
// if none masks.
double least_mask(const Problem& problem);

// Returns the product with 0 in place of elements of at least the magnitude `least`.
Problem without_mask(const Problem& problem, double least);

// Returns how many rows of C contradict the unmasked product with the mask put in.
int64_t rows_that_contradict(
    const at::Tensor& c, const at::Tensor& unmasked, const Problem& problem, double least);

}  // namespace holdfast
