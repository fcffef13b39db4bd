// The fused verification of C = beta · addend + alpha · A B by signed row checksums.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "core/product.h"

namespace holdfast {

bool supported(const at::Tensor& tensor);

// What the check of one product computes for later ones while it reads A, and what it was given by
// an earlier one. The products of a linear layer and of its gradients read each operand twice.
struct Sharing {
  bool encode_a = false;  // Compute `of_a`, the encoding of A as the right operand of a product.
  Encoding of_a;  // A device's check writes to it if it is defined, and says so by `encoded`.
  bool encoded = false;
  std::optional<Encoding> across;  // Of a matrix B with as many rows as A: compute sums for Aᵀ B.
  at::Tensor column_sums;  // Σ_i A_ij u_i, fp64 [K], for a 2-D A.
  at::Tensor column_walks;  // Σ_i A_ij² z_i, fp64 [K], for a dtype that accumulates in itself.
  at::Tensor dots, walks;  // The same sums for the rows of A, fp64 [M], if they are known.
  bool ask_mask = false;  // Do not check a product whose addend is a mask, but set `least_mask`.
  double least_mask = 0;  // What `least_mask` in gemm/masked.h returns.
};

// Returns whether the column sums of A can be computed in the same pass.
bool sums_columns(const at::Tensor& a);

// Returns how many rows of C are suspect. It reads C and A once in fast precision, and the rows
// that this cannot decide again in fp64. If there are any, `verdict` gets residual, threshold and
// energy of these rows, and zeros for the others, as `verify` returns them.
int64_t count_suspects(
    const at::Tensor& c, const Problem& problem, const Encoding& encoding, Sharing& sharing,
    at::Tensor* verdict = nullptr);

// Returns residual, threshold and energy (Σ_j C²) of every row, fp64 [3, batch, M]. If B is given,
// the threshold of a row that exceeds it allows for partial sums that drift up and back, up to the
// worst-case bound.
at::Tensor verify(const at::Tensor& c, const Problem& problem, const Encoding& encoding);

// Returns the threshold of the first row of C, with all that `verify` may allow for, divided by the
// row's rms. Smaller relative changes may pass.
double detection_line(const at::Tensor& c, const Problem& problem, const Encoding& encoding);

}  // namespace holdfast
