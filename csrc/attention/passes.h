// The passes of fused attention over one tile of scores, dispatched like those of reduce.h.
#pragma once

#include <cstdint>

namespace holdfast {

// The errors that a pass detected in a row.
enum class Wrong : int {
  nothing,
  scores,  // a row sum of S = Q Kᵀ differs from its checksum
  probabilities,  // not within [0, 1], or the maximum is not attained, or they do not sum to 1
  state,  // running maximum or sum differs from its copy, or is out of bounds
  accumulator,  // an output or gradient accumulator differs from its checksum
  grad_probabilities,  // a row sum of dP = dO Vᵀ differs from its checksum
  grad_scores,  // a row sum of dS differs from that of P ∘ dP, less δ times that of P
};

struct RowVerdict {
  int64_t row;  // the first row in question; the number of rows if there is none
  Wrong wrong;
};

// The mask of a tile: rows of values that are added to the scores.
template <typename T>
struct TileMask {
  const T* values = nullptr;
  int64_t stride = 0;
  int64_t diagonal = INT64_MAX / 2;  // row i sees columns below i + diagonal
};

// The running state of the rows of a query tile, with a copy of what no checksum covers.
template <typename T>
struct SoftmaxState {
  T *maximum, *sum;  // m and l
  T *maximum_copy, *sum_copy;  // computed apart
  T *carry, *cross;  // Σ_j P_ij (V r)_j: what Σ_d r_d O_id must be; and of other signs
  T* weight;  // at least Σ_j P_ij² z_j, for the threshold
};

// Forward, in place: scores S become probabilities exp(scale S + mask − m). The raw scores of a row
// are compared with `expected` within `limit` before they are used. `columns` of them hold keys; up
// to `padded`, a multiple of kTileStep, there are zeros before and after.
constexpr int64_t kTileStep = 32;
template <typename T>
struct SoftmaxTile {
  bool narrow;  // P is rounded to bf16 for the product, and so is what its checksum counts
  int64_t rows, columns, padded, stride;
  T* scores;
  TileMask<T> mask;
  T scale;
  const T *signs, *expected, *limit, *value_sums, *cross_sums;
  T largest;  // of the z_j
  SoftmaxState<T> state;
  T* output;  // accumulators [rows, width], rescaled here; null at the first tile
  int64_t width;
  const uint8_t* excused;  // a byte for each row: not checked if it is not zero
};

// Backward, in place: S becomes P = exp(scale S + mask − lse), and dP becomes dS = P ∘ (dP − δ).
template <typename T>
struct GradientTile {
  bool narrow;  // P and dS are rounded to bf16
  int64_t rows, columns, padded, stride;
  T *scores, *gradients;
  TileMask<T> mask;
  T scale;
  const T *signs, *expected_scores, *limit_scores, *expected_gradients, *limit_gradients;
  const T *lse, *delta;
  const T* most;  // what no element of P may exceed
  const T* key_sums;  // (K r)_j
  // Σ_j r_j P_ij and Σ_j P_ij² (or more, where squares underflow), and the same of dS
  T *p_signed, *p_square, *s_signed, *s_square;
  // Σ_j P_ij and Σ_j dS_ij before they are rounded, and Σ_j P_ij dP_ij
  T *p_sum, *s_sum, *p_dot;
  T *p_total, *carry;  // added to: Σ_j P_ij and Σ_j dS_ij (K r)_j
  const uint8_t* excused;
};

template <typename T>
struct TilePasses {
  // From row `first` on; rows below `cleared` are not compared with their checksums.
  RowVerdict (*softmax)(const SoftmaxTile<T>&, int64_t first, int64_t cleared);
  RowVerdict (*gradient)(
      const GradientTile<T>&, int64_t first, int64_t cleared_scores, int64_t cleared_gradients);
  // dot_i = Σ_k a_ik w_k and square_i = Σ_k a_ik² z_k
  void (*dots)(
      const T* a, int64_t rows, int64_t width, int64_t stride, const T* w, const T* z, T* dot,
      T* square);
  // Added: sum_k += Σ_i a_ik u_i and square_k += Σ_i a_ik² y_i, or more where squares underflow
  void (*columns)(
      const T* a, int64_t rows, int64_t width, int64_t stride, const T* u, const T* y, T* sum,
      T* square);
  // a_ik *= factor_i; then sum_i = Σ_k a_ik r_k and square_i = Σ_k a_ik²; and, unless `cross` is
  // null, cross_i = Σ_k a_ik r'_k of other signs
  void (*finish)(
      T* a, int64_t rows, int64_t width, int64_t stride, const T* factor, const T* signs, T* sum,
      T* square, const T* cross_signs, T* cross);
  // dot_i = Σ_k a_ik b_ik, and the same again, computed apart
  void (*inner)(
      const T* a, const T* b, int64_t rows, int64_t width, int64_t stride, T* dot, T* copy);
  // Of K or V: plain_i = Σ_k a_ik, beside `finish`'s sums
  void (*sums)(
      const T* a, int64_t rows, int64_t width, int64_t stride, const T* signs, T* sum, T* square,
      T* plain, const T* cross_signs, T* cross);
  // to [width, rows] = fromᵀ
  void (*transpose)(
      const T* from, int64_t rows, int64_t width, int64_t stride, T* to, int64_t to_stride);
  int64_t lanes;  // of a vector
};

struct AttentionPasses {
  TilePasses<float> f32;
  TilePasses<double> f64;
  // Numbers that bf16 holds, as bf16: in rows, or two rows at a time, [rows / 2, stride, 2].
  void (*narrow_rows)(
      const float* from, int64_t rows, int64_t width, int64_t stride, uint16_t* to,
      int64_t to_stride);
  void (*narrow_pairs)(
      const float* from, int64_t rows, int64_t width, int64_t stride, uint16_t* to,
      int64_t to_stride);
  const char* name;
};

extern const AttentionPasses attention_passes_default;
#if defined(__x86_64__)
extern const AttentionPasses attention_passes_avx2, attention_passes_avx512;
#endif

// As wide as the reductions are (reduce.h).
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
