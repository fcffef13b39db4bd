// Row checksums of a GEMM: encoding of B, and the fused verification of C.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "reduce.h"

namespace holdfast {

// Row checksums of B [batch, K, N] and the sums over k that V-ABFT's threshold needs.
struct Encoding {
  at::Tensor row_sum;     // fp64 [batch, K]: Σ_j B[k, j]
  at::Tensor statistics;  // fp64 [batch, 4]: Σ|μ_k|, Σμ_k², Σσ_k², fingerprint of row_sum
};

// C = beta · addend + alpha · A B, all as 3-D tensors.
struct Problem {
  std::optional<at::Tensor> addend;  // broadcastable to C
  at::Tensor a, b;
  double beta = 1, alpha = 1;
};

struct Verdict {
  at::Tensor rows;  // fp64 [3, batch, M]: residual, threshold, energy (Σ_j C²)
  int64_t suspects = 0;
  double line = 0;         // Σ over rows of threshold / rms(C row)
  int64_t line_rows = 0;   // rows counted in it
};

// V-ABFT's constants (set once from Python, where their source is documented).
struct ThresholdModel {
  double e_max[4] = {0, 0, 0, 0};  // indexed by Element
  double c_sigma = 0;
  double extreme_energy = 0;  // rows of C with more Σ C² are suspect whatever their residual
};
ThresholdModel& threshold_model();

bool supported(const at::Tensor& tensor);
Encoding encode(const at::Tensor& b);
Verdict verify(const at::Tensor& c, const Problem& problem, const Encoding& encoding);

}  // namespace holdfast
