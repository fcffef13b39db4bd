// The points of a product at which a fault may be injected.
#pragma once

#include <iterator>

namespace holdfast {

// The first three belong to a GEMM, the others to a tile of fused attention, as the kernel computed
// it and before anything is verified. `exponentials` and `grad_softmax` are P and dS as though they
// had been computed so: their sums follow what is written into them. `probabilities` and
// `grad_scores` are the same two after their sums were formed.
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

// By Stage. The names that Python knows them by (sites.STAGES and sites.TILE_STAGES).
constexpr const char* kStages[] = {
    "checksum",      "operand",     "output",     "scores",
    "probabilities", "accumulator", "state",      "grad_probabilities",
    "grad_query",    "grad_key",    "grad_value", "grad_scores",
    "exponentials",  "grad_softmax"};
static_assert(std::size(kStages) == static_cast<int>(Stage::grad_softmax) + 1);

}  // namespace holdfast
