// The checksums of a right operand that grows, position by position (keys and values while
// decoding).
#pragma once

#include <ATen/core/Tensor.h>

#include "core/product.h"

namespace holdfast {

// Adds columns of B to its sums: [batch, 3, K] += Σ_j r_j B_kj, Σ_j B_kj², Σ_j B_kj, where b
// [batch, K, n] are the columns from `first`. In fp64 and in the order of the columns, so that sums
// made at once and bit by bit agree in every bit.
void add_columns(const at::Tensor& sums, const at::Tensor& b, int64_t first);

// Returns what encode(b) would for a B with these sums, number of columns and dtype.
Encoding encoding_of_sums(const at::Tensor& sums, int64_t columns, at::ScalarType type);

// The fingerprint of each matrix's sums, fp64 [batch].
at::Tensor fingerprints(const at::Tensor& sums);

}  // namespace holdfast
