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
  at::Tensor kept;  // bool [batch, heads, Lq, Lk], what dropout keeps; undefined without dropout
  double dropout = 0;  // the probability of dropping
};

// What was decided about one suspect row.
enum class Verdict : int {
  repaired,  // A second computation differed from the first, and its result is used.
  persistent,  // The wrong value repeats, or no two computations agree.
  checksum,  // The checksum itself was damaged and has been computed again.
  operand,  // K or V changed between its encoding and its use.
  nonfinite,  // A NaN or INF in the inputs explains it.
  overflow,  // The inputs are finite, and a product is beyond the range of the format.
  dismissed,  // The value repeats, and rounding explains it.
};

// The names in the order of Verdict (VERDICTS of abft/attention/suspects.py in Python).
constexpr const char* kVerdicts[] = {"repaired",  "persistent", "checksum", "operand",
                                     "nonfinite", "overflow",   "dismissed"};
static_assert(std::size(kVerdicts) == static_cast<int>(Verdict::dismissed) + 1);

// A tile of queries and one of keys; −1 where a whole row or column of tiles is meant.
struct TilePlace {
  int64_t batch, head, query_tile, key_tile;
};

// A check that did not hold.
struct Failure {
  Wrong wrong;
  const char* part;  // the name of the matrix or input
  TilePlace place;
  int64_t row = -1;  // of the tile
};

struct Finding : Failure {
  Verdict verdict;
  int64_t column = -1;  // of the tile
  double corrupted = 0, repaired = 0;  // the element before and after the repair
  int64_t rows = 1;  // the number of rows with this verdict, if it is about inputs or rounding
};

// The fault injector's function. It is called with the stage, the tile, its query rows [rows, d]
// and its keys transposed, [d, columns].
using Probe = std::function<void(Stage, const at::Tensor&, const at::Tensor&, const at::Tensor&)>;

struct AttentionChecks {
  bool verify = true;
  Probe probe;  // It is empty if nothing is injected.
};

struct AttentionReport {
  std::vector<Finding> findings;  // They are sorted by place.
  int64_t suspects = 0;
  double encode_s = 0;  // The seconds that the encoding took.
  double line = 0;  // The threshold of one row of scores divided by its rms.
};

// Called with what a kernel found and has decided, and with its output, which tells the device.
inline auto& on_attention_findings =
    *new Callback<const SiteKey&, const AttentionReport&, const at::Tensor&>;

void intercept_attention(torch::Library& library);

// Draws what dropout keeps as torch does where it writes attention out, by bernoulli_ on a tensor
// of the scores' sizes and dtype: bool, true for what is kept.
at::Tensor draw_kept(at::IntArrayRef sizes, double dropout, at::ScalarType scores);

// Returns why this problem is left to torch's own kernel, or null if it is not.
const char* unsupported(const Attention& problem);

// Returns the output [batch, heads, Lq, d] and the log-sum-exp [batch, heads, Lq], in the memory
// layout of torch's kernel.
std::tuple<at::Tensor, at::Tensor> attention_forward(
    const Attention& problem, const AttentionChecks& checks, AttentionReport& report);

// Returns the gradients of q, k and v.
std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_backward(
    const Attention& problem, const at::Tensor& grad, const at::Tensor& out, const at::Tensor& lse,
    const AttentionChecks& checks, AttentionReport& report);

}  // namespace holdfast
