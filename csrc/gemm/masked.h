// Products whose addend masks elements with INF (abft/gemm/masked.py says how they are verified).
#pragma once

#include "core/product.h"

namespace holdfast {

bool masked(const Problem& problem);

Problem without_mask(const Problem& problem);  // with 0 in place of INF

// How many rows of C are not, bit for bit, the unmasked product with the mask's INF put in.
int64_t rows_that_contradict(
    const at::Tensor& c, const at::Tensor& unmasked, const Problem& problem);

}  // namespace holdfast
