// A matrix product under verification, and the checksums of its right operand.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace holdfast {

// What is kept of B [batch, K, N] (thresholds/rounding.py derives the statistics).
struct Encoding {
  at::Tensor row_sum;  // fp64 [batch, K]: Σ_j r_j B[k, j]
  at::Tensor statistics;  // fp64 [batch, K + 2]: z_k, h, and the fingerprint of all before it
};

// C = beta · addend + alpha · A B, all as 3-D tensors.
struct Problem {
  std::optional<at::Tensor> addend;  // broadcastable to C
  at::Tensor a, b;
  double beta = 1, alpha = 1;
};

}  // namespace holdfast
