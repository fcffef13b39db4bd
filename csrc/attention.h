// Fused attention on CPU, verified inside the loop over its tiles
// (holdfast/abft/attention/README.md).
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <tuple>
#include <vector>

#include "attention_passes.h"

namespace holdfast {

struct Attention {
  at::Tensor q, k, v;  // [batch, heads, Lq, d], [batch, kv heads, Lk, d] twice
  std::optional<at::Tensor> mask;
  bool causal = false;
  double scale = 1;
};

// What was decided of one suspicion.
enum class Verdict : int {
  repaired,  // a second computation differed, and is what is used
  persistent,  // it repeats, or no two computations agree
  checksum,  // the checksum itself was damaged; made anew
  operand,  // K or V changed between its encoding and its use
  nonfinite,  // explained by a NaN or INF in the inputs
  overflow,  // finite inputs, and a product beyond the format
  dismissed,  // it repeats, and rounding explains it
};

struct Finding {
  Verdict verdict;
  Wrong wrong;
  const char* part;  // which matrix or input
  int64_t batch, head, query_tile, key_tile;  // −1 where a whole row or column of tiles is meant
  int64_t row = -1, column = -1;  // of the tile
  double corrupted = 0, repaired = 0;
  int64_t rows = 1;  // how many were found like this; where they are inputs or rounding, not where
};

// Where faults may be injected: a tile, as the kernel computed it and nobody has looked at yet.
// `exponentials` and `grad_softmax` are P and dS as though they had been computed so: their sums
// follow what is written into them. Probabilities and grad_scores are the same two afterwards.
enum class Place : int {
  scores,
  probabilities,
  accumulator,
  state,
  grad_probabilities,
  grad_query,
  grad_key,
  grad_value,
  grad_scores,
  exponentials,
  grad_softmax
};
// Called with the tile, its query rows [rows, d], and its keys transposed [d, columns].
using Probe = std::function<void(Place, const at::Tensor&, const at::Tensor&, const at::Tensor&)>;

struct AttentionChecks {
  bool verify = true;
  Probe probe;  // empty: nothing is injected
};

struct AttentionReport {
  std::vector<Finding> findings;  // by place
  int64_t suspects = 0;
  double encode_s = 0;  // seconds
  double line = 0;  // threshold / rms of one row of scores
};

// Why this problem is left to torch's own kernel; null if it is not.
const char* unsupported(const Attention& problem);

// Output [batch, heads, Lq, d] and log-sum-exp [batch, heads, Lq], laid out as torch's kernel does.
std::tuple<at::Tensor, at::Tensor> attention_forward(
    const Attention& problem, const AttentionChecks& checks, AttentionReport& report);

// Gradients of q, k and v.
std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_backward(
    const Attention& problem, const at::Tensor& grad, const at::Tensor& out, const at::Tensor& lse,
    const AttentionChecks& checks, AttentionReport& report);

}  // namespace holdfast
