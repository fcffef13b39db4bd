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

// The product C = beta · addend + alpha · A B of matrices or of batches of them. What follows alpha
// is for products of a device only; tensors are undefined where there are none.
struct Problem {
  std::optional<at::Tensor> addend;  // It can be broadcast to C.
  at::Tensor a, b;
  double beta = 1, alpha = 1;
  // fp32 factors of the rows and columns of A B: of one element, [M, 1] and [1, N].
  at::Tensor row_scale{}, column_scale{};
  // The ends of groups, int32 [groups]: of the rows of A [M, K], of which each group has a matrix
  // of B [groups, K, N], or of the columns of A and rows of B [K, N] for C [groups, M, N].
  at::Tensor ends{};
  bool fast_sums = false;  // Sums of fp8 products may be kept in few bits until they are complete.
};

}  // namespace holdfast
