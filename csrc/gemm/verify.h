// The fused verification of C = beta · addend + alpha · A B by signed row checksums.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "core/product.h"

namespace holdfast {

bool supported(const at::Tensor& tensor);

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
