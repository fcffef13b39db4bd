// Signed row checksums of a GEMM: encoding of B, and the fused verification of C.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>

#include "reduce.h"

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

// The rounding threshold's constants (set once from Python, where their source is documented).
struct ThresholdModel {
  double output_sigmas = 0, accumulation_sigmas = 0;
  std::array<int64_t, 4> panels = {1, 1, 1, 1};  // by Element
  int64_t narrow = 1;
  double check_steps = 0, mean_noise = 0;
  double extreme_energy = 0;  // rows of C with more Σ C² are suspect whatever their residual
};
ThresholdModel& threshold_model();

bool supported(const at::Tensor& tensor);
Encoding encode(const at::Tensor& b);
bool intact(const Encoding& encoding);  // whether it still has its fingerprint

// What the reading of A gives beside this product's own check, for products to come, and what
// an earlier one gave: gradients of a linear layer read both of its operands twice.
struct Sharing {
  bool encode_a = false;  // give `of_a`: A as the right operand of a product
  Encoding of_a;
  std::optional<Encoding> across;  // of a B with as many rows as A: give the sums for Aᵀ B
  at::Tensor column_sums;  // Σ_i A_ij u_i, fp64 [K], of a 2-D A
  at::Tensor column_walks;  // Σ_i A_ij² z_i, fp64 [K], of one that accumulates in its dtype
  at::Tensor dots, walks;  // known: A's own such sums, fp64 [M]
};

// Whether the column sums of A can be had in the same pass.
bool sums_columns(const at::Tensor& a);

// How many rows of C are suspect. One fast pass over C and A; rows that it cannot settle are read
// again in fp64.
int64_t count_suspects(
    const at::Tensor& c, const Problem& problem, const Encoding& encoding, Sharing& sharing);

// Residual, threshold and energy (Σ_j C²) of every row, in fp64: [3, batch, M]. With B at hand the
// threshold of a row that exceeds it allows for partial sums that drift up and back.
at::Tensor verify(const at::Tensor& c, const Problem& problem, const Encoding& encoding);

// threshold / rms of the first row of C: a change smaller than that passes.
double detection_line(const at::Tensor& c, const Problem& problem, const Encoding& encoding);

}  // namespace holdfast
