// The body of reduce.h, compiled once per instruction set: the including file sets the target,
// HOLDFAST_REDUCE and HOLDFAST_UNROLL. Nothing from the standard library is included here, so that
// no inline function built for a wider instruction set can leak into the rest of the program.
#include "reduce.h"

#if defined(HOLDFAST_BF16_DOT)
#include <immintrin.h>
#endif

namespace holdfast {
namespace {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// 64 bytes of accumulators, which the compiler splits where registers are narrower.
typedef float F16 __attribute__((vector_size(64)));
typedef uint32_t U16 __attribute__((vector_size(64)));
typedef uint16_t S16 __attribute__((vector_size(32)));
typedef double D8 __attribute__((vector_size(64)));
typedef float F8 __attribute__((vector_size(32)));
typedef uint32_t U8 __attribute__((vector_size(32)));
typedef uint16_t S8 __attribute__((vector_size(16)));
typedef double D4 __attribute__((vector_size(32)));
typedef double D2 __attribute__((vector_size(16)));

template <typename V>
inline V raw(const void* from) {
  V value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}

template <typename F, typename U>
inline F half_to_float(U x) {
  // Exponent and mantissa moved into fp32 position, then rescaled: exact for subnormals too.
  const F scaled = (F)((x & 0x7fffu) << 13) * 0x1p112f;
  const U special = (U)((x & 0x7c00u) == 0x7c00u) & 0x7f800000u;
  return (F)((U)scaled | special | ((x & 0x8000u) << 16));
}

// A vector of accumulators of type Wide, and how elements are loaded into it.
template <typename Wide>
struct Lanes;

template <>
struct Lanes<float> {
  using V = F16;
  static constexpr int64_t count = 16;
  static V load(const float* x) { return raw<F16>(x); }
  static V load(const BFloat16* x) {
    return (F16)(__builtin_convertvector(raw<S16>(x), U16) << 16);
  }
  static V load(const Half* x) {
    return half_to_float<F16>(__builtin_convertvector(raw<S16>(x), U16));
  }
};

template <>
struct Lanes<double> {
  using V = D8;
  static constexpr int64_t count = 8;
  static V load(const double* x) { return raw<D8>(x); }
  static V load(const float* x) { return __builtin_convertvector(raw<F8>(x), D8); }
  static V load(const BFloat16* x) {
    return __builtin_convertvector((F8)(__builtin_convertvector(raw<S8>(x), U8) << 16), D8);
  }
  static V load(const Half* x) {
    return __builtin_convertvector(half_to_float<F8>(__builtin_convertvector(raw<S8>(x), U8)), D8);
  }
};

inline D8 widened(const D8& v) { return v; }
inline D8 widened(const F16& v) {
  const auto* halves = reinterpret_cast<const char*>(&v);
  return __builtin_convertvector(raw<F8>(halves), D8) +
      __builtin_convertvector(raw<F8>(halves + 32), D8);
}

inline double total(const D8& v) {
  const auto* halves = reinterpret_cast<const char*>(&v);
  const D4 four = raw<D4>(halves) + raw<D4>(halves + 32);
  const auto* quarters = reinterpret_cast<const char*>(&four);
  const D2 two = raw<D2>(quarters) + raw<D2>(quarters + 16);
  return two[0] + two[1];
}

// Which sums are wanted besides the weighted one.
enum class Want { none, square, scaled_square, square_and_plain };
constexpr bool squares(Want want) { return want != Want::none; }

template <typename V>
struct Sums {
  V weighted{}, square{}, plain{};
};

template <Want want, typename V>
inline void add(Sums<V>& sums, const V& x, const V& weight, const V& scale) {
  sums.weighted += x * weight;
  if constexpr (want == Want::scaled_square) sums.square += x * x * scale;
  if constexpr (want == Want::square || want == Want::square_and_plain) sums.square += x * x;
  if constexpr (want == Want::square_and_plain) sums.plain += x;
}

template <Want want, typename Total, typename V>
inline void gather(Sums<Total>& all, const Sums<V>& part) {
  all.weighted += widened(part.weighted);
  if constexpr (squares(want)) all.square += widened(part.square);
  if constexpr (want == Want::square_and_plain) all.plain += widened(part.plain);
}

template <Want want>
inline void store(const RowSums& out, int64_t row, double weighted, double square, double plain) {
  out.weighted[row] = weighted;
  if constexpr (squares(want)) out.square[row] = square;
  if constexpr (want == Want::square_and_plain) out.plain[row] = plain;
}

inline const double* weights_of(const Weights& w, double) { return w.wide; }
inline const float* weights_of(const Weights& w, float) { return w.narrow; }
inline const double* scale_of(const Weights& w, double) { return w.scale; }
inline const float* scale_of(const Weights&, float) { return nullptr; }

constexpr int64_t kUnroll = HOLDFAST_UNROLL;  // vectors summed side by side
constexpr int64_t kAdditions = 8;             // of one accumulator before it is gathered in fp64

// Rows contiguous: each row is reduced on its own.
template <typename T, typename Wide, Want want>
void rows_contiguous(const MatrixView& m, const Weights& w, const RowSums& out) {
  using L = Lanes<Wide>;
  using V = typename L::V;
  constexpr int64_t kStep = L::count * kUnroll;
  const Wide* weights = weights_of(w, Wide{});
  const Wide* scales = scale_of(w, Wide{});
  const auto take = [](Sums<V>& sums, const T* x, const Wide* weight, const Wide* scale) {
    add<want>(
        sums, L::load(x), raw<V>(weight), want == Want::scaled_square ? raw<V>(scale) : V{});
  };
  for (int64_t i = 0; i < m.rows; ++i) {
    const T* row = static_cast<const T*>(m.data) + i * m.row_stride;
    Sums<D8> sums;
    int64_t j = 0;
    while (m.cols - j >= kStep) {
      const int64_t left = (m.cols - j) / kStep;
      const int64_t stop = j + kStep * (left < kAdditions ? left : kAdditions);
      Sums<V> part[kUnroll];
      for (; j < stop; j += kStep) {
        for (int64_t u = 0; u < kUnroll; ++u) {
          const int64_t at = j + u * L::count;
          take(part[u], row + at, weights + at, scales + at);
        }
      }
      for (int64_t u = 1; u < kUnroll; ++u) {
        part[0].weighted += part[u].weighted;
        part[0].square += part[u].square;
        part[0].plain += part[u].plain;
      }
      gather<want>(sums, part[0]);
    }
    for (; m.cols - j >= L::count; j += L::count) {
      Sums<V> part;
      take(part, row + j, weights + j, scales + j);
      gather<want>(sums, part);
    }
    if (j < m.cols) {
      T last[L::count] = {};
      Wide weight[L::count] = {}, scale[L::count] = {};
      for (int64_t l = 0; j + l < m.cols; ++l) {
        last[l] = row[j + l];
        weight[l] = weights[j + l];
        if constexpr (want == Want::scaled_square) scale[l] = scales[j + l];
      }
      Sums<V> part;
      take(part, last, weight, scale);
      gather<want>(sums, part);
    }
    store<want>(out, i, total(sums.weighted), total(sums.square), total(sums.plain));
  }
}

// Columns contiguous (a transposed view): a strip of `count` rows, at most kVectors vectors of
// them, is reduced together, so that memory is still read along its contiguous direction.
template <typename T, typename Wide, Want want, int64_t kVectors>
void strip(
    const MatrixView& m, const Weights& w, const RowSums& out, int64_t begin, int64_t count) {
  using L = Lanes<Wide>;
  using V = typename L::V;
  constexpr int64_t kBlock = 32;  // columns summed before they are gathered in fp64
  constexpr int64_t kRows = L::count * kVectors;
  const T* data = static_cast<const T*>(m.data) + begin;
  const Wide* weights = weights_of(w, Wide{});
  const Wide* scales = scale_of(w, Wide{});
  double weighted[kRows] = {}, square[kRows] = {}, plain[kRows] = {};
  T padded[kRows] = {};
  for (int64_t k = 0; k < m.cols;) {
    const int64_t stop = m.cols - k < kBlock ? m.cols : k + kBlock;
    Sums<V> part[kVectors];
    for (; k < stop; ++k) {
      const T* column = data + k * m.col_stride;
      if (count < kRows) {
        for (int64_t i = 0; i < count; ++i) padded[i] = column[i];
        column = padded;
      }
      const V weight = V{} + weights[k];
      const V scale = want == Want::scaled_square ? V{} + scales[k] : V{};
      for (int64_t u = 0; u < kVectors; ++u) {
        add<want>(part[u], L::load(column + u * L::count), weight, scale);
      }
    }
    for (int64_t u = 0; u < kVectors; ++u) {
      for (int64_t l = 0; l < L::count; ++l) {
        weighted[u * L::count + l] += part[u].weighted[l];
        if constexpr (squares(want)) square[u * L::count + l] += part[u].square[l];
        if constexpr (want == Want::square_and_plain) plain[u * L::count + l] += part[u].plain[l];
      }
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    store<want>(out, begin + i, weighted[i], square[i], plain[i]);
  }
}

template <typename T, typename Wide, Want want>
void columns_contiguous(const MatrixView& m, const Weights& w, const RowSums& out) {
  constexpr int64_t kLanes = Lanes<Wide>::count;
  int64_t i = 0;
  for (; m.rows - i >= 4 * kLanes; i += 4 * kLanes) {
    strip<T, Wide, want, 4>(m, w, out, i, 4 * kLanes);
  }
  for (; i < m.rows; i += kLanes) {
    strip<T, Wide, want, 1>(m, w, out, i, m.rows - i < kLanes ? m.rows - i : kLanes);
  }
}

#if defined(HOLDFAST_BF16_DOT)
inline __m512bh bf16_at(const uint16_t* from) { return (__m512bh)_mm512_loadu_si512(from); }
inline __m512bh bf16_at(const uint16_t* from, __mmask32 mask) {
  return (__m512bh)_mm512_maskz_loadu_epi16(mask, from);
}

// Rows of bf16 through the dot instruction: 32 products each, summed in fp32. Of the squares, one
// vector in four is summed: a lower bound that settles all but a few rows.
template <bool kPair, Want want>
void rows_bf16(const MatrixView& m, const Weights& w, const RowSums& out) {
  constexpr int64_t kLanes = 32, kStep = kLanes * kUnroll;
  for (int64_t i = 0; i < m.rows; ++i) {
    const uint16_t* row = static_cast<const uint16_t*>(m.data) + i * m.row_stride;
    Sums<D8> sums;
    int64_t j = 0;
    while (j < m.cols) {
      const int64_t left = (m.cols - j) / kStep;
      const int64_t stop = j + kStep * (left < kAdditions ? left : kAdditions);
      __m512 weighted[kUnroll], square = _mm512_setzero_ps();
      for (int64_t u = 0; u < kUnroll; ++u) weighted[u] = _mm512_setzero_ps();
      for (; j < stop; j += kStep) {
        for (int64_t u = 0; u < kUnroll; ++u) {
          const int64_t at = j + u * kLanes;
          const __m512bh x = bf16_at(row + at);
          weighted[u] = _mm512_dpbf16_ps(weighted[u], x, bf16_at(w.high + at));
          if constexpr (kPair) weighted[u] = _mm512_dpbf16_ps(weighted[u], x, bf16_at(w.low + at));
          if (squares(want) && u == 0) square = _mm512_dpbf16_ps(square, x, x);
        }
      }
      if (left < kAdditions) {  // the rest of the row
        for (int64_t u = 0; j < m.cols; j += kLanes, ++u) {
          const int64_t count = m.cols - j < kLanes ? m.cols - j : kLanes;
          const __mmask32 mask = ~__mmask32{0} >> (kLanes - count);
          const __m512bh x = bf16_at(row + j, mask);
          weighted[0] = _mm512_dpbf16_ps(weighted[0], x, bf16_at(w.high + j, mask));
          if constexpr (kPair) {
            weighted[1] = _mm512_dpbf16_ps(weighted[1], x, bf16_at(w.low + j, mask));
          }
          if (squares(want) && u == 0) square = _mm512_dpbf16_ps(square, x, x);
        }
      }
      for (int64_t u = 1; u < kUnroll; ++u) weighted[0] += weighted[u];
      gather<want>(sums, Sums<F16>{(F16)weighted[0], (F16)square});
    }
    store<want>(out, i, total(sums.weighted), total(sums.square), 0);
  }
}

// Whether the dot instruction can do it; if so, done.
bool reduced_bf16(
    Element element, Precision precision, const MatrixView& m, const Weights& w,
    const RowSums& out) {
  const bool rows = m.col_stride == 1 || m.cols == 1;
  if (element != Element::bf16 || precision != Precision::fast || !rows || out.plain != nullptr) {
    return false;
  }
  if (w.low != nullptr) {
    out.square != nullptr ? rows_bf16<true, Want::square>(m, w, out)
                          : rows_bf16<true, Want::none>(m, w, out);
  } else {
    out.square != nullptr ? rows_bf16<false, Want::square>(m, w, out)
                          : rows_bf16<false, Want::none>(m, w, out);
  }
  return true;
}
#endif

template <typename T, typename Wide, Want want>
void reduce(const MatrixView& m, const Weights& w, const RowSums& out) {
  if (m.col_stride == 1 || m.cols == 1) {
    rows_contiguous<T, Wide, want>(m, w, out);
  } else {
    columns_contiguous<T, Wide, want>(m, w, out);
  }
}

template <typename T, typename Wide>
void reduce(const MatrixView& m, const Weights& w, const RowSums& out) {
  if (out.square == nullptr) return reduce<T, Wide, Want::none>(m, w, out);
  if (out.plain != nullptr) return reduce<T, Wide, Want::square_and_plain>(m, w, out);
  if constexpr (sizeof(Wide) == sizeof(double)) {
    if (w.scale != nullptr) return reduce<T, Wide, Want::scaled_square>(m, w, out);
  }
  return reduce<T, Wide, Want::square>(m, w, out);
}

template <typename T>
void reduce(Precision precision, const MatrixView& m, const Weights& w, const RowSums& out) {
  return precision == Precision::fast ? reduce<T, float>(m, w, out) : reduce<T, double>(m, w, out);
}

}  // namespace

void HOLDFAST_REDUCE(
    Element element, Precision precision, const MatrixView& m, const Weights& w,
    const RowSums& out) {
#if defined(HOLDFAST_BF16_DOT)
  if (reduced_bf16(element, precision, m, w, out)) return;
#endif
  switch (element) {
    case Element::f64: return reduce<double, double>(m, w, out);
    case Element::f32: return reduce<float>(precision, m, w, out);
    case Element::f16: return reduce<Half>(precision, m, w, out);
    case Element::bf16: return reduce<BFloat16>(precision, m, w, out);
  }
}

}  // namespace holdfast
