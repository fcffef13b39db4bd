// Fused attention on CPU, verified inside the loop over its tiles
// (holdfast/abft/attention/README.md).
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <tuple>
#include <vector>

#include "attention/passes.h"
#include "core/callbacks.h"

namespace torch {
class Library;
}

namespace holdfast {

struct Attention {
  at::Tensor q, k, v;  // [batch, heads, Lq, d], [batch, kv heads, Lk, d] twice
  std::optional<at::Tensor> mask;
  bool causal = false;
  double scale = 1;
};

// The decision about one suspect row.
enum class Verdict : int {
  repaired,  // a second computation differed, and is what is used
  persistent,  // it repeats, or no two computations agree
  checksum,  // the checksum itself was damaged; made anew
  operand,  // K or V changed between its encoding and its use
  nonfinite,  // explained by a NaN or INF in the inputs
  overflow,  // finite inputs, and a product beyond the format
  dismissed,  // it repeats, and rounding explains it
};

// By Verdict. The names that Python knows them by (ops/attention/fused.py, VERDICTS).
constexpr const char* kVerdicts[] = {"repaired",  "persistent", "checksum", "operand",
                                     "nonfinite", "overflow",   "dismissed"};
static_assert(std::size(kVerdicts) == static_cast<int>(Verdict::dismissed) + 1);

struct Finding {
  Verdict verdict;
  Wrong wrong;
  const char* part;  // which matrix or input
  int64_t batch, head, query_tile, key_tile;  // −1 where a whole row or column of tiles is meant
  int64_t row = -1, column = -1;  // of the tile
  double corrupted = 0, repaired = 0;
  int64_t rows = 1;  // how many were found like this; where they are inputs or rounding, not where
};

// Called with the tile, its query rows [rows, d], and its keys transposed [d, columns].
using Probe = std::function<void(Stage, const at::Tensor&, const at::Tensor&, const at::Tensor&)>;

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

// Called with what a kernel found and decided already; the output is there for its device.
inline auto& on_attention_findings =
    *new Callback<const SiteKey&, const AttentionReport&, const at::Tensor&>;

void intercept_attention(torch::Library& library);

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
