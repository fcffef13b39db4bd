// The points of a computation at which a fault may be injected.
#pragma once

#include <iterator>

namespace holdfast {

// The first three belong to a GEMM. The others belong to a tile of fused attention, and the hook
// sees the tile before anything of it is verified. At `exponentials` and `grad_softmax` the
// injector changes P and dS as if they had been computed wrong: the sums over them are changed
// alike. At `probabilities` and `grad_scores` it changes the same two after their sums have been
// formed.
enum class Stage : int {
  checksum,
  operand,
  output,
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

// The names in the order of Stage (sites.STAGES and sites.TILE_STAGES in Python).
constexpr const char* kStages[] = {
    "checksum",      "operand",     "output",     "scores",
    "probabilities", "accumulator", "state",      "grad_probabilities",
    "grad_query",    "grad_key",    "grad_value", "grad_scores",
    "exponentials",  "grad_softmax"};
static_assert(std::size(kStages) == static_cast<int>(Stage::grad_softmax) + 1);

}  // namespace holdfast
