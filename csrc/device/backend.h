// What verifies products on one kind of device, without waiting for it.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

#include "core/product.h"
#include "device/tolerance.h"
#include "gemm/encoding_cache.h"
#include "gemm/verify.h"

namespace holdfast::device {

// A finished product, and where its verdict goes.
struct Judged {
  const at::Tensor& c;  // [M, N] or [batch, M, N]
  const Problem& problem;
  const Encoding& encoding;  // Made by the same backend.
  Tolerance tolerance;
  at::Tensor slot;  // int32 [1] of the ledger: the bits of the largest |D| / T so far.
};

// Returns true if the groups of a product divide what its sums run over, and not the rows of A.
inline bool divides_inner(const Judged& judged) {
  return judged.problem.ends.defined() && judged.c.dim() == 3;
}

// Verifies C = beta · addend + alpha · A B by rows, where alpha includes the scale of the row:
//
//   S = Σ_j r_j (c_ij − beta d_ij)     P = alpha Σ_k a_ik s_k     D = S − P
//   E = Σ_j c_ij²   G = beta² Σ_j d_ij²   F = Σ_j (c_ij − beta d_ij)²
//   W = alpha² Σ_k a_ik² z_k + 2 G
//   T = scale √(output² E + walk² W + drift² max(F − 4 W, 0)) + floor
//
// and raises `slot` to the bits of max_i |D_i| / T_i. Where D is NaN or T is not finite it is NaN
// if finite operands cannot have such a result, as |c_ij| ≤ √(K W), and else INF. A row beside an
// infinite addend is not judged. Groups have s_k and z_k of their own matrix, or sums over their
// own k; rows of A that are in no group are not judged, as torch does not write them. All of it
// runs on the current stream of the device, and can be captured in a graph.
class Backend {
 public:
  virtual ~Backend() = default;

  // Returns why a product that was not computed yet cannot be verified; empty if it can.
  virtual const char* obstacle(const Problem& problem) const = 0;

  // Returns the encoding of B [K, N] or [batch, K, N]: `row_sum` has s_k = Σ_j r_j b_kj, and
  // `statistics` has z_k = Σ_j b_kj² + g N m_k² (tolerance.h), both [batch, K] and fp32, or fp64
  // for fp32 and fp64 operands. With scales of columns, [1, N] or of one element, b_kj has its own
  // as a factor; they are undefined if there are none.
  virtual EncodedTwice encode_twice(const at::Tensor& b, const at::Tensor& column_scale) = 0;
  Encoding encode(const at::Tensor& b, const at::Tensor& column_scale = {}) {
    return encode_twice(b, column_scale).encoding;
  }

  // Returns the encodings of a matrix B and of Bᵀ, and reads B once.
  virtual std::pair<EncodedTwice, EncodedTwice> encode_both(const at::Tensor& b) = 0;

  // `sharing` asks for what later products will need of A, and gives what is known of it already:
  // - encode_a: write `of_a`, the encoding of A as the right operand of a product;
  // - across: write `column_sums`, Σ_i A_ij u_i, and `column_walks`, Σ_i A_ij² z_i, both [K];
  // - dots and walks: Σ_k a_ik s_k and Σ_k a_ik² z_k are known, so that A is not read.
  virtual void judge(const Judged& judged, Sharing& sharing) = 0;
};

// Plain ATen operations, on any device: the reference for the kernels.
Backend& aten_backend();

// Returns T of every row of a product, fp64 [batch, M]; the slot is not used.
at::Tensor row_thresholds(const Judged& judged);

}  // namespace holdfast::device
