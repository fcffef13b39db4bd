// A matrix product under verification, and the checksums of its right operand.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace holdfast {

// The checksums of B [batch, K, N], and the statistics for the threshold, which
// thresholds/rounding.py derives.
struct Encoding {
  at::Tensor row_sum;  // Σ_j r_j B[k, j], fp64 [batch, K].
  at::Tensor statistics;  // z_k, h and the fingerprint of all others, fp64 [batch, K + 2].
};

// The product C = beta · addend + alpha · A B of matrices or of batches of them.
struct Problem {
  std::optional<at::Tensor> addend;  // It can be broadcast to C.
  at::Tensor a, b;
  double beta = 1, alpha = 1;
};

}  // namespace holdfast
