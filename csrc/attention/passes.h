// The passes of fused attention over one tile of scores, for each instruction set.
#pragma once

#include <cstdint>

namespace holdfast {

// The errors that a pass detected in a row.
enum class Wrong : int {
  nothing,
  scores,  // A row sum of S = Q Kᵀ differs from its checksum.
  probabilities,  // One is outside [0, 1], none is 1 at the maximum, or their sum is not 1.
  state,  // The running maximum or sum differs from its copy or is impossible.
  accumulator,  // A row of an output or gradient differs from its checksum.
  grad_probabilities,  // A row sum of dP = dO Vᵀ differs from its checksum.
  grad_scores,  // A row sum of dS is not that of P ∘ dP less δ times that of P.
};

struct RowVerdict {
  int64_t row;  // The first suspect row, or the number of rows if there is none.
  Wrong wrong;
};

// The mask of a tile, whose values are added to the scores.
template <typename T>
struct TileMask {
  const T* values = nullptr;
  int64_t stride = 0;
  int64_t diagonal = INT64_MAX / 2;  // Row i sees the columns below i + diagonal.
};

// What dropout keeps of a tile: a byte for each probability, which is 1 if it is kept, and the
// factor of those that are kept.
template <typename T>
struct TileDropout {
  const uint8_t* kept = nullptr;  // null without dropout
  int64_t stride = 0;
  T factor = 1;
};

// The running state of the rows of a query tile. What no checksum covers is kept twice.
template <typename T>
struct SoftmaxState {
  T *maximum, *sum;  // These are m and l.
  T *maximum_copy, *sum_copy;  // They are computed a second time.
  T *carry, *cross;  // Σ_j D_ij (V r)_j, which Σ_d r_d O_id must equal; also with other signs.
  T* weight;  // An upper bound of Σ_j D_ij² z_j, for the threshold.
};

// The forward pass over a tile, in place: scores S become probabilities P = exp(scale S + mask −
// m), and with dropout D = P ∘ kept · factor, while l is the sum of P. Without dropout D is P.
// Before the scores of a row are used, their signed sum is compared with `expected`, within
// `limit`. The first `columns` belong to keys; from there to `padded`, a multiple of kTileStep, the
// scores and the probabilities are zero.
constexpr int64_t kTileStep = 32;
template <typename T>
struct SoftmaxTile {
  bool narrow;  // P is rounded to bf16, for the product and for its checksum.
  int64_t rows, columns, padded, stride;
  T* scores;
  TileMask<T> mask;
  TileDropout<T> dropout;
  T scale;
  const T *signs, *expected, *limit, *value_sums, *cross_sums;
  T largest;  // The largest z_j.
  SoftmaxState<T> state;
  T* output;  // The sums [rows, width], which are rescaled here; null at the first tile.
  int64_t width;
  const uint8_t* excused;  // A byte for each row, which is not checked if this is not zero.
};

// The values that the backward pass keeps for each row of a tile of queries.
enum class GradientRow : int {
  expected_scores,  // the checksum of the row of S, and what it may be off by
  limit_scores,
  expected_gradients,  // the same of dD
  limit_gradients,
  lse,
  delta,  // δ = Σ_k dO_ik O_ik, and the same computed a second time
  delta_copy,
  most,  // what no element of P may exceed
  slack,  // what Σ_j P_ij may differ from 1 by
  p_signed,  // Σ_j r_j D_ij
  p_square,  // Σ_j D_ij², or more where squares underflow
  s_signed,  // the same two of dS
  s_square,
  p_sum,  // Σ_j P_ij and Σ_j dS_ij before they are rounded
  s_sum,
  p_dot,  // Σ_j D_ij dD_ij, which is Σ_j P_ij dP_ij
  p_total,  // Σ_j P_ij over the tiles so far
  carry,  // Σ_j dS_ij (K r)_j over the tiles so far
  factor,
  sums,
  energies
};
constexpr int64_t kGradientRows = static_cast<int64_t>(GradientRow::energies) + 1;
constexpr int64_t kQueryTile = 64;

// The values of one kind in a buffer that holds all of them.
template <typename T>
T* row_of(T* values, GradientRow which) {
  return values + static_cast<int64_t>(which) * kQueryTile;
}

// The backward pass over a tile, in place: S becomes D, as in the forward pass, of P = exp(scale S
// + mask − lse), and dD = dO Vᵀ becomes dS = P ∘ (dP − δ) with dP = dD ∘ kept · factor.
template <typename T>
struct GradientTile {
  bool narrow;  // P and dS are rounded to bf16.
  int64_t rows, columns, padded, stride;
  T *scores, *gradients;
  TileMask<T> mask;
  TileDropout<T> dropout;
  T scale;
  const T *signs, *key_sums;  // r_j and (K r)_j
  T* values;  // of each GradientRow
  const uint8_t* excused;  // as in SoftmaxTile
  T* row(GradientRow which) const { return row_of(values, which); }
};

template <typename T>
struct TilePasses {
  // Begins with row `first`. Rows below `cleared` are not compared with their checksums.
  RowVerdict (*softmax)(const SoftmaxTile<T>&, int64_t first, int64_t cleared);
  RowVerdict (*gradient)(
      const GradientTile<T>&, int64_t first, int64_t cleared_scores, int64_t cleared_gradients);
  // Computes dot_i = Σ_k a_ik w_k and square_i = Σ_k a_ik² z_k.
  void (*dots)(
      const T* a, int64_t rows, int64_t width, int64_t stride, const T* w, const T* z, T* dot,
      T* square);
  // Adds Σ_i a_ik u_i to sum_k, and Σ_i a_ik² y_i, or more where squares underflow, to square_k.
  void (*columns)(
      const T* a, int64_t rows, int64_t width, int64_t stride, const T* u, const T* y, T* sum,
      T* square);
  // Multiplies row i by factor_i. Then it computes sum_i = Σ_k a_ik r_k, square_i = Σ_k a_ik² and,
  // unless `cross` is null, cross_i, which is the first sum with other signs.
  void (*finish)(
      T* a, int64_t rows, int64_t width, int64_t stride, const T* factor, const T* signs, T* sum,
      T* square, const T* cross_signs, T* cross);
  // Computes dot_i = Σ_k a_ik b_ik twice, independently.
  void (*inner)(
      const T* a, const T* b, int64_t rows, int64_t width, int64_t stride, T* dot, T* copy);
  // Computes the sums of `finish`, and plain_i = Σ_k a_ik, of K or V.
  void (*sums)(
      const T* a, int64_t rows, int64_t width, int64_t stride, const T* signs, T* sum, T* square,
      T* plain, const T* cross_signs, T* cross);
  // Writes fromᵀ to `to` [width, rows].
  void (*transpose)(
      const T* from, int64_t rows, int64_t width, int64_t stride, T* to, int64_t to_stride);
  int64_t lanes;  // The lanes of a vector.
};

struct AttentionPasses {
  TilePasses<float> f32;
  TilePasses<double> f64;
  // Convert numbers that bf16 can hold to bf16, in rows, or in pairs of rows [rows / 2, stride, 2].
  void (*narrow_rows)(
      const float* from, int64_t rows, int64_t width, int64_t stride, uint16_t* to,
      int64_t to_stride);
  void (*narrow_pairs)(
      const float* from, int64_t rows, int64_t width, int64_t stride, uint16_t* to,
      int64_t to_stride);
  // The generator MT19937 of Matsumoto and Nishimura: computes its next 624 numbers in place, and
  // tempers some of them.
  void (*advance)(uint32_t* state);
  void (*temper)(const uint32_t* state, int64_t count, uint32_t* to);
  // Sets to[i] to 1 if the lower 53 bits of a pair of numbers, the upper half first, are below
  // `limit`, and to 0 if not.
  void (*below)(const uint32_t* words, int64_t pairs, uint64_t limit, uint8_t* to);
  const char* name;
};

extern const AttentionPasses attention_passes_default, attention_passes_avx2,
    attention_passes_avx512;

// Returns the passes for the instruction set that the reductions run on.
const AttentionPasses& attention_passes();

template <typename T>
const TilePasses<T>& tile_passes();
template <>
inline const TilePasses<float>& tile_passes<float>() {
  return attention_passes().f32;
}
template <>
inline const TilePasses<double>& tile_passes<double>() {
  return attention_passes().f64;
}

}  // namespace holdfast
