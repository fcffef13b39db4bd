// The reductions of core/reduce.h, compiled once for each instruction set (core/simd/vectors.h).
#include "core/reduce.h"
#include "core/simd/vectors.h"
// It needs the vectors.
#include "core/simd/entries.h"

#if HOLDFAST_BYTES == 64
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

// Vectors of one register, and those that widen to one.
typedef float Floats __attribute__((vector_size(kBytes)));
typedef uint32_t Words __attribute__((vector_size(kBytes)));
typedef uint16_t Shorts __attribute__((vector_size(kBytes / 2)));
typedef double Doubles __attribute__((vector_size(kBytes)));
typedef uint64_t LongWords __attribute__((vector_size(kBytes)));
typedef float FewFloats __attribute__((vector_size(kBytes / 2)));
typedef uint32_t FewWords __attribute__((vector_size(kBytes / 2)));
typedef uint16_t FewShorts __attribute__((vector_size(kBytes / 4)));

constexpr int64_t kDoubles = kBytes / sizeof(double);

inline Doubles to_doubles(const FewFloats& x) {
#if HOLDFAST_BYTES == 64
  // Left to itself, GCC 12 converts two halves and puts them together.
  return (Doubles)_mm512_maskz_cvtps_pd(0xff, (__m256)x);
#else
  return __builtin_convertvector(x, Doubles);
#endif
}

template <typename F, typename U>
inline F half_to_float(const U& x) {
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
  using V = Floats;
  using Word = uint32_t;
  using Bits = Words;
  static constexpr int64_t count = kBytes / sizeof(float);
  static V load(const float* x) { return raw<Floats>(x); }
  static V load(const BFloat16* x) {
    return (Floats)(__builtin_convertvector(raw<Shorts>(x), Words) << 16);
  }
  static V load(const Half* x) {
    return half_to_float<Floats>(__builtin_convertvector(raw<Shorts>(x), Words));
  }
};

template <>
struct Lanes<double> {
  using V = Doubles;
  using Word = uint64_t;
  using Bits = LongWords;
  static constexpr int64_t count = kBytes / sizeof(double);
  static V load(const double* x) { return raw<Doubles>(x); }
  static V load(const float* x) { return to_doubles(raw<FewFloats>(x)); }
  static V load(const BFloat16* x) {
    const FewWords wide = __builtin_convertvector(raw<FewShorts>(x), FewWords) << 16;
    return to_doubles((FewFloats)wide);
  }
  static V load(const Half* x) {
    const FewWords wide = __builtin_convertvector(raw<FewShorts>(x), FewWords);
    return to_doubles(half_to_float<FewFloats>(wide));
  }
};

inline Doubles widened(Doubles v) { return v; }
inline Doubles widened(Floats v) { return to_doubles(low(v)) + to_doubles(high(v)); }

// Which sums are wanted besides the weighted one.
enum Want : unsigned { kNothing = 0, kSquare = 1, kScale = 2, kPlain = 4, kDot = 8, kSample = 16 };

template <typename V>
struct Sums {
  V weighted, square, plain, dot;
};

// The weights that meet one vector of elements.
template <typename V>
struct Factors {
  V weight{}, scale{}, other{};
};

template <unsigned want, typename V>
inline void add(Sums<V>& sums, const V& x, const Factors<V>& by) {
  sums.weighted += x * by.weight;
  if constexpr ((want & kScale) != 0) {
    sums.square += x * x * by.scale;
  } else if constexpr ((want & kSquare) != 0) {
    sums.square += x * x;
  }
  if constexpr ((want & kPlain) != 0) sums.plain += x;
  if constexpr ((want & kDot) != 0) sums.dot += x * by.other;
}

template <unsigned want, typename Total, typename V>
inline void gather(Sums<Total>& all, const Sums<V>& part) {
  all.weighted += widened(part.weighted);
  if constexpr ((want & kSquare) != 0) all.square += widened(part.square);
  if constexpr ((want & kPlain) != 0) all.plain += widened(part.plain);
  if constexpr ((want & kDot) != 0) all.dot += widened(part.dot);
}

// Each lane on its own, in one vector of doubles or in two.
inline void add_lanes(Doubles& first, Doubles*, Doubles v) { first += v; }
inline void add_lanes(Doubles& first, Doubles* second, Floats v) {
  first += to_doubles(low(v));
  *second += to_doubles(high(v));
}

template <unsigned want, typename V>
inline void gather_lanes(Sums<Doubles>* all, const Sums<V>& part) {
  add_lanes(all[0].weighted, &all[1].weighted, part.weighted);
  if constexpr ((want & kSquare) != 0) add_lanes(all[0].square, &all[1].square, part.square);
  if constexpr ((want & kPlain) != 0) add_lanes(all[0].plain, &all[1].plain, part.plain);
  if constexpr ((want & kDot) != 0) add_lanes(all[0].dot, &all[1].dot, part.dot);
}

// Writes the sums of `count` rows, a lane each.
template <unsigned want>
inline void store(
    const RowSums& out, int64_t row, const Sums<Doubles>& sums, int64_t count = kDoubles) {
  const uint64_t bytes = static_cast<uint64_t>(count) * sizeof(double);
  __builtin_memcpy(out.weighted + row, &sums.weighted, bytes);
  if constexpr ((want & kSquare) != 0) __builtin_memcpy(out.square + row, &sums.square, bytes);
  if constexpr ((want & kPlain) != 0) __builtin_memcpy(out.plain + row, &sums.plain, bytes);
  if constexpr ((want & kDot) != 0) __builtin_memcpy(out.dot + row, &sums.dot, bytes);
}

// The sums of `count` rows to go on from.
template <unsigned want>
inline Sums<Doubles> begun(const RowSums& out, int64_t row, int64_t count = kDoubles) {
  Sums<Doubles> sums{};
  if (!out.onto) return sums;
  const uint64_t bytes = static_cast<uint64_t>(count) * sizeof(double);
  __builtin_memcpy(&sums.weighted, out.weighted + row, bytes);
  if constexpr ((want & kSquare) != 0) __builtin_memcpy(&sums.square, out.square + row, bytes);
  if constexpr ((want & kPlain) != 0) __builtin_memcpy(&sums.plain, out.plain + row, bytes);
  if constexpr ((want & kDot) != 0) __builtin_memcpy(&sums.dot, out.dot + row, bytes);
  return sums;
}

inline const double* weights_of(const Weights& w, double) { return w.wide; }
inline const float* weights_of(const Weights& w, float) { return w.narrow; }
inline const double* scale_of(const Weights& w, double) { return w.scale; }
inline const float* scale_of(const Weights&, float) { return nullptr; }

// The three weightings of a pass, in one precision.
template <typename Wide>
struct Columns {
  Columns(const Weights& w, const Weights& v)
      : weights(weights_of(w, Wide{})),
        scales(scale_of(w, Wide{})),
        others(weights_of(v, Wide{})) {}
  template <unsigned want, typename V>
  Factors<V> at(int64_t j) const {
    return {
        raw<V>(weights + j), (want & kScale) != 0 ? raw<V>(scales + j) : V{},
        (want & kDot) != 0 ? raw<V>(others + j) : V{}};
  }
  const Wide *weights, *scales, *others;
};

constexpr int64_t kUnroll = 4;  // vectors summed side by side
constexpr int64_t kAdditions = 8;  // of one accumulator before it is gathered in fp64

// A sample's squares are those of one vector in a few.
constexpr bool sampled(unsigned want, int64_t u) { return (want & kSample) != 0 && u != 0; }

// Vectors summed side by side, added up.
template <typename V, int64_t kCount>
inline Sums<V> joined(const Sums<V> (&part)[kCount]) {
  Sums<V> all = part[0];
  for (int64_t u = 1; u < kCount; ++u) {
    all.weighted += part[u].weighted;
    all.square += part[u].square;
    all.plain += part[u].plain;
    all.dot += part[u].dot;
  }
  return all;
}

// Adds the halves of each block of `length` lanes of two vectors, the blocks of the first one
// first.
template <int64_t length, int64_t... lane>
inline Doubles folded(const Doubles& v, const Doubles& w, Indices<lane...>) {
  constexpr int64_t half = length / 2;
  return __builtin_shufflevector(v, w, (lane / half * length + lane % half)...) +
      __builtin_shufflevector(v, w, (lane / half * length + lane % half + half)...);
}

// The totals of `count` vectors in as many lanes, in fewer steps, with the additions of `total`.
template <int64_t count, int64_t length = kDoubles>
inline Doubles totals(Doubles* all) {
  if constexpr (length == 1) {
    return all[0];
  } else {
    constexpr int64_t left = (count + 1) / 2;
    for (int64_t i = 0; i < left; ++i) {
      const Doubles& next = all[2 * i + 1 < count ? 2 * i + 1 : 2 * i];
      all[i] = folded<length>(all[2 * i], next, typename Upto<kDoubles>::Type{});
    }
    return totals<left, length / 2>(all);
  }
}

// Sums of several rows, and their totals.
using Group = Sums<Doubles[kDoubles]>;

template <unsigned want>
inline void put(Group& group, int64_t row, const Sums<Doubles>& sums) {
  group.weighted[row] = sums.weighted;
  if constexpr ((want & kSquare) != 0) group.square[row] = sums.square;
  if constexpr ((want & kPlain) != 0) group.plain[row] = sums.plain;
  if constexpr ((want & kDot) != 0) group.dot[row] = sums.dot;
}

template <unsigned want>
inline Sums<Doubles> totals(Group& group) {
  return {
      totals<kDoubles>(group.weighted),
      (want & kSquare) != 0 ? totals<kDoubles>(group.square) : Doubles{},
      (want & kPlain) != 0 ? totals<kDoubles>(group.plain) : Doubles{},
      (want & kDot) != 0 ? totals<kDoubles>(group.dot) : Doubles{}};
}

// The last columns of every row, fewer than a vector: they are the end of the row's last vector,
// whose other lanes were added before and are left out; rows shorter than a vector are copied.
template <typename T, typename Wide, unsigned want>
class LastColumns {
  using L = Lanes<Wide>;
  using V = typename L::V;

 public:
  LastColumns(int64_t cols, const Columns<Wide>& columns)
      : cols_(cols), count_(cols % L::count), first_(cols < L::count ? 0 : L::count - count_) {
    Wide weight[L::count] = {}, scale[L::count] = {}, other[L::count] = {};
    typename L::Word keep[L::count] = {};
    for (int64_t l = 0; l < count_; ++l) {
      const int64_t j = cols - count_ + l, lane = first_ + l;
      weight[lane] = columns.weights[j];
      if constexpr ((want & kScale) != 0) scale[lane] = columns.scales[j];
      if constexpr ((want & kDot) != 0) other[lane] = columns.others[j];
      keep[lane] = ~typename L::Word{};
    }
    by_ = {raw<V>(weight), raw<V>(scale), raw<V>(other)};
    keep_ = raw<typename L::Bits>(keep);
  }

  void add_to(Sums<Doubles>& sums, const T* row) const {
    if (count_ == 0) return;
    V x;
    if (cols_ >= L::count) {
      x = (V)((typename L::Bits)L::load(row + cols_ - L::count) & keep_);
    } else {
      T last[L::count] = {};
      for (int64_t l = 0; l < count_; ++l) last[l] = row[l];
      x = L::load(last);
    }
    Sums<V> part{};
    add<want>(part, x, by_);
    gather<want>(sums, part);
  }

 private:
  int64_t cols_, count_, first_;
  Factors<V> by_;
  typename L::Bits keep_;
};

// Fetches memory that a pass over contiguous rows reaches soon: a quarter faster than what the
// processor does of its own accord, where rows come from memory.
template <int64_t bytes>
inline void prefetch(const void* from) {
  constexpr int64_t kLine = 64, kAhead = 2048;
  const char* ahead = static_cast<const char*>(from) + kAhead;
  for (int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(ahead + at);
}

// The sums of one row, each lane apart.
template <typename T, typename Wide, unsigned want>
inline Sums<Doubles> reduced_row(
    const T* row, int64_t cols, const Columns<Wide>& columns,
    const LastColumns<T, Wide, want>& last) {
  using L = Lanes<Wide>;
  using V = typename L::V;
  constexpr int64_t kStep = L::count * kUnroll;
  constexpr unsigned less = want & ~kSquare;
  Sums<Doubles> sums{};
  int64_t j = 0;
  while (cols - j >= kStep) {
    const int64_t left = (cols - j) / kStep;
    const int64_t stop = j + kStep * (left < kAdditions ? left : kAdditions);
    Sums<V> part[kUnroll] = {};
    for (; j < stop; j += kStep) {
      // A sample is taken of what was just computed.
      if constexpr ((want & kSample) == 0) prefetch<kStep * sizeof(T)>(row + j);
      for (int64_t u = 0; u < kUnroll; ++u) {
        const int64_t at = j + u * L::count;
        const V x = L::load(row + at);
        const Factors<V> by = columns.template at<want, V>(at);
        sampled(want, u) ? add<less>(part[u], x, by) : add<want>(part[u], x, by);
      }
    }
    gather<want>(sums, joined(part));
  }
  for (; cols - j >= L::count; j += L::count) {
    Sums<V> part{};
    add<want>(part, L::load(row + j), columns.template at<want, V>(j));
    gather<want>(sums, part);
  }
  last.add_to(sums, row);
  return sums;
}

// Rows contiguous: each row is reduced on its own, but for the additions of its lanes.
template <typename T, typename Wide, unsigned want>
void rows_contiguous(const MatrixView& m, const Columns<Wide>& columns, const RowSums& out) {
  const LastColumns<T, Wide, want> last(m.cols, columns);
  for (int64_t i = 0; i < m.rows; i += kDoubles) {
    const int64_t count = m.rows - i < kDoubles ? m.rows - i : kDoubles;
    Group group;
    for (int64_t r = 0; r < count; ++r) {
      const T* row = static_cast<const T*>(m.data) + (i + r) * m.row_stride;
      put<want>(group, r, reduced_row(row, m.cols, columns, last));
    }
    for (int64_t r = count; r < kDoubles; ++r) put<want>(group, r, Sums<Doubles>{});
    store<want>(out, i, totals<want>(group), count);
  }
}

// Rows of a transposed view from `begin`, fewer than a vector.
template <typename T, unsigned want, typename Wide>
void last_rows(
    const MatrixView& m, const Columns<Wide>& columns, const RowSums& out, int64_t begin) {
  using L = Lanes<double>;
  Sums<Doubles> sums[Lanes<Wide>::count / L::count];
  const int64_t rows = m.rows - begin;
  const auto count = [&](int64_t i) { return rows - i < L::count ? rows - i : L::count; };
  for (int64_t i = 0; i < rows; i += L::count) {
    sums[i / L::count] = begun<want>(out, begin + i, count(i));
  }
  for (int64_t k = 0; k < m.cols; ++k) {
    const T* from = static_cast<const T*>(m.data) + begin + k * m.col_stride;
    const Factors<Doubles> by{
        Doubles{} + static_cast<double>(columns.weights[k]),
        (want & kScale) != 0 ? Doubles{} + static_cast<double>(columns.scales[k]) : Doubles{},
        (want & kDot) != 0 ? Doubles{} + static_cast<double>(columns.others[k]) : Doubles{}};
    for (int64_t i = 0; i < rows; i += L::count) {
      T padded[L::count] = {};
      for (int64_t l = 0; l < L::count && i + l < rows; ++l) padded[l] = from[i + l];
      add<want>(sums[i / L::count], L::load(padded), by);
    }
  }
  for (int64_t i = 0; i < rows; i += L::count) {
    store<want>(out, begin + i, sums[i / L::count], count(i));
  }
}

// The weights of one column of a transposed view, for all lanes.
template <unsigned want, typename V, typename Wide>
inline Factors<V> spread(const Columns<Wide>& columns, int64_t k) {
  return {
      V{} + columns.weights[k], (want & kScale) != 0 ? V{} + columns.scales[k] : V{},
      (want & kDot) != 0 ? V{} + columns.others[k] : V{}};
}

// kColumns columns of a transposed view, which memory holds as rows, added to the sums of as many
// vectors of its rows.
template <typename T, typename Wide, unsigned want, int64_t kColumns, typename V>
inline void add_columns(
    const T* from, int64_t stride, const Columns<Wide>& columns, int64_t k, Sums<V>* part,
    int64_t vectors) {
  using L = Lanes<Wide>;
  Factors<V> by[kColumns];
  for (int64_t c = 0; c < kColumns; ++c) by[c] = spread<want, V>(columns, k + c);
  for (int64_t u = 0; u < vectors; ++u) {
    Sums<V> sums = part[u];
    for (int64_t c = 0; c < kColumns; ++c) {
      add<want>(sums, L::load(from + c * stride + u * L::count), by[c]);
    }
    part[u] = sums;
  }
}

// Columns contiguous (a transposed view): its rows side by side, a panel of them at a time, so that
// memory is still read along its contiguous direction.
template <typename T, typename Wide, unsigned want>
void columns_contiguous(const MatrixView& m, const Columns<Wide>& columns, const RowSums& out) {
  using L = Lanes<Wide>;
  using V = typename L::V;
  constexpr int64_t kVectors = 32;  // of a panel: their sums stay in the first cache
  constexpr int64_t kColumns = 8;  // of one visit to the sums
  constexpr int64_t kSplit = L::count / kDoubles;
  for (int64_t begin = 0; begin < m.rows;) {
    const int64_t rows =
        m.rows - begin < kVectors * L::count ? m.rows - begin : kVectors * L::count;
    const int64_t vectors = rows / L::count;
    const T* data = static_cast<const T*>(m.data) + begin;
    if (vectors == 0) {
      last_rows<T, want>(m, columns, out, begin);
      return;
    }
    Sums<Doubles> sums[kVectors * kSplit];
    for (int64_t i = 0; i < vectors * kSplit; ++i) sums[i] = begun<want>(out, begin + i * kDoubles);
    for (int64_t k = 0; k < m.cols;) {
      const int64_t stop = m.cols - k < kColumnsGathered ? m.cols : k + kColumnsGathered;
      Sums<V> part[kVectors];
      for (int64_t u = 0; u < vectors; ++u) part[u] = Sums<V>{};
      for (; stop - k >= kColumns; k += kColumns) {
        add_columns<T, Wide, want, kColumns>(
            data + k * m.col_stride, m.col_stride, columns, k, part, vectors);
      }
      for (; k < stop; ++k) {
        add_columns<T, Wide, want, 1>(
            data + k * m.col_stride, m.col_stride, columns, k, part, vectors);
      }
      for (int64_t u = 0; u < vectors; ++u) gather_lanes<want>(sums + u * kSplit, part[u]);
    }
    for (int64_t i = 0; i < vectors * kSplit; ++i) store<want>(out, begin + i * kDoubles, sums[i]);
    begin += vectors * L::count;
  }
}

// See CrossSums. kRows rows at a time, so that the column sums are loaded and stored less often.
template <typename T, int64_t kRows, bool kSquares>
void cross(const T* rows, const MatrixView& m, const CrossSums& sums, int64_t begin) {
  using L = Lanes<float>;
  constexpr int64_t kChunk = 16 * L::count;  // columns summed before they are gathered in fp64
  Doubles all[kRows] = {};
  Floats by_row[kRows], scale[kRows];
  for (int64_t r = 0; r < kRows; ++r) {
    by_row[r] = Floats{} + sums.row_weights[begin + r];
    if constexpr (kSquares) scale[r] = Floats{} + sums.row_scales[begin + r];
  }
  for (int64_t j = 0; j < m.cols;) {
    const int64_t stop = m.cols - j < kChunk ? m.cols : j + kChunk;
    Floats part[kRows] = {};
    for (; j < stop; j += L::count) {
      const Floats by_column = raw<Floats>(sums.column_weights + j);
      Floats column = raw<Floats>(sums.columns + j), square{};
      if constexpr (kSquares) square = raw<Floats>(sums.squares + j);
      for (int64_t r = 0; r < kRows; ++r) {
        const Floats x = L::load(rows + r * m.row_stride + j);
        part[r] += x * by_column;
        column += x * by_row[r];
        if constexpr (kSquares) square += x * x * scale[r];
      }
      __builtin_memcpy(sums.columns + j, &column, sizeof column);
      if constexpr (kSquares) __builtin_memcpy(sums.squares + j, &square, sizeof square);
    }
    for (int64_t r = 0; r < kRows; ++r) all[r] += widened(part[r]);
  }
  for (int64_t r = 0; r < kRows; ++r) sums.rows[begin + r] = total(all[r]);
}

template <typename T, bool kSquares>
void cross(const MatrixView& m, const CrossSums& sums) {
  constexpr int64_t kRows = kBytes / 8;
  const T* data = static_cast<const T*>(m.data);
  int64_t i = 0;
  for (; m.rows - i >= kRows; i += kRows) {
    cross<T, kRows, kSquares>(data + i * m.row_stride, m, sums, i);
  }
  for (; i < m.rows; ++i) cross<T, 1, kSquares>(data + i * m.row_stride, m, sums, i);
}

template <typename T>
void cross(const MatrixView& m, const CrossSums& sums) {
  sums.squares != nullptr ? cross<T, true>(m, sums) : cross<T, false>(m, sums);
}

#if defined(HOLDFAST_AVX512BF16)
constexpr __mmask32 kAll = ~__mmask32{0};

inline __m512bh bf16_at(const uint16_t* from, __mmask32 mask) {
  return (__m512bh)(mask == kAll ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi16(mask, from));
}

template <bool kPair>
inline Floats add_dot(Floats sum, __m512bh x, const Weights& w, int64_t j, __mmask32 mask) {
  const __m512 high = _mm512_dpbf16_ps((__m512)sum, x, bf16_at(w.high + j, mask));
  return kPair ? (Floats)_mm512_dpbf16_ps(high, x, bf16_at(w.low + j, mask)) : (Floats)high;
}

constexpr int64_t kTogether = 4;  // rows reduced side by side, which share the loads of the weights
constexpr int64_t kRowUnroll = 2;  // vectors of each

// A row's vectors added up, each lane in fp64. (An array of `Sums` would live in memory.)
inline void gather(Doubles& all, Floats (&part)[kRowUnroll]) {
  Floats sum = part[0];
  for (int64_t u = 1; u < kRowUnroll; ++u) sum += part[u];
  all += widened(sum);
  for (int64_t u = 0; u < kRowUnroll; ++u) part[u] = Floats{};
}

// The totals of rows to `out`.
template <int64_t kRows>
inline void store_totals(double* out, Doubles (&all)[kRows]) {
  const Doubles of_rows = totals<kRows>(all);
  __builtin_memcpy(out, &of_rows, kRows * sizeof(double));
}

// kRows rows of bf16 through the dot instruction: 32 products each, summed in fp32. The weights are
// a pair of numbers with kPair. What a row gives does not depend on how many are reduced beside it.
template <bool kPair, unsigned want, int64_t kRows>
void row_group_bf16(
    const MatrixView& m, const Weights& w, double* weighted_to, double* square_to, int64_t begin) {
  constexpr int64_t kLanes = 32, kStep = kLanes * kRowUnroll;
  const uint16_t* rows = static_cast<const uint16_t*>(m.data) + begin * m.row_stride;
  Doubles weighted[kRows] = {}, square[kRows] = {};
  Floats weighted_part[kRows][kRowUnroll] = {}, square_part[kRows][kRowUnroll] = {};
  const auto add = [&](int64_t r, int64_t u, int64_t j, __mmask32 mask) {
    const __m512bh x = bf16_at(rows + r * m.row_stride + j, mask);
    weighted_part[r][u] = add_dot<kPair>(weighted_part[r][u], x, w, j, mask);
    if ((want & kSquare) != 0 && !sampled(want, u)) {
      square_part[r][u] = (Floats)_mm512_dpbf16_ps((__m512)square_part[r][u], x, x);
    }
  };
  int64_t j = 0;
  while (j < m.cols) {
    const int64_t left = (m.cols - j) / kStep;
    const int64_t stop = j + kStep * (left < kAdditions ? left : kAdditions);
    for (; j < stop; j += kStep) {
      for (int64_t u = 0; u < kRowUnroll; ++u) {
        for (int64_t r = 0; r < kRows; ++r) add(r, u, j + u * kLanes, kAll);
      }
    }
    if (left < kAdditions) {  // the rest of the rows: less than a step
      for (int64_t u = 0; u < kRowUnroll && j < m.cols; ++u, j += kLanes) {
        const int64_t count = m.cols - j < kLanes ? m.cols - j : kLanes;
        for (int64_t r = 0; r < kRows; ++r) add(r, u, j, kAll >> (kLanes - count));
      }
    }
    for (int64_t r = 0; r < kRows; ++r) {
      gather(weighted[r], weighted_part[r]);
      if ((want & kSquare) != 0) gather(square[r], square_part[r]);
    }
  }
  store_totals(weighted_to + begin, weighted);
  if ((want & kSquare) != 0) store_totals(square_to + begin, square);
}

// The second weighting, always a pair, reads rows again that the first cache still has: all sums of
// a group at once do not fit the registers.
template <bool kPair, unsigned want>
void rows_bf16(const MatrixView& m, const Weights& w, const Weights& v, const RowSums& out) {
  constexpr unsigned first = want & ~kDot;
  int64_t i = 0;
  for (; m.rows - i >= kTogether; i += kTogether) {
    row_group_bf16<kPair, first, kTogether>(m, w, out.weighted, out.square, i);
    if ((want & kDot) == 0) continue;
    row_group_bf16<true, kNothing, kTogether>(m, v, out.dot, nullptr, i);
  }
  for (; i < m.rows; ++i) {
    row_group_bf16<kPair, first, 1>(m, w, out.weighted, out.square, i);
    if ((want & kDot) != 0) row_group_bf16<true, kNothing, 1>(m, v, out.dot, nullptr, i);
  }
}

// Whether the dot instruction can do it; if so, done.
bool reduced_bf16(
    Element element, Precision precision, const MatrixView& m, const Weights& w, const Weights& v,
    const RowSums& out) {
  const bool rows = (m.col_stride == 1 || m.cols == 1) && !out.onto;
  if (element != Element::bf16 || precision != Precision::fast || !rows || out.plain != nullptr) {
    return false;
  }
  if (out.dot != nullptr) {
    rows_bf16<false, kSquare | kDot>(m, w, v, out);
  } else if (out.square == nullptr) {
    w.low != nullptr ? rows_bf16<true, kNothing>(m, w, v, out)
                     : rows_bf16<false, kNothing>(m, w, v, out);
  } else {
    out.sample ? rows_bf16<false, kSquare | kSample>(m, w, v, out)
               : rows_bf16<false, kSquare>(m, w, v, out);
  }
  return true;
}
#endif

template <typename T, typename Wide, unsigned want>
void reduce(const MatrixView& m, const Weights& w, const Weights& v, const RowSums& out) {
  const Columns<Wide> columns(w, v);
  if ((m.col_stride == 1 || m.cols == 1) && !out.onto) {
    rows_contiguous<T, Wide, want>(m, columns, out);
  } else {
    columns_contiguous<T, Wide, want>(m, columns, out);
  }
}

template <typename T, typename Wide>
void reduce(const MatrixView& m, const Weights& w, const Weights& v, const RowSums& out) {
  const unsigned want = (out.square != nullptr ? kSquare : kNothing) |
      (out.plain != nullptr ? kPlain : kNothing) | (out.dot != nullptr ? kDot : kNothing);
  switch (want) {
    case kNothing: return reduce<T, Wide, kNothing>(m, w, v, out);
    case kSquare | kPlain: return reduce<T, Wide, kSquare | kPlain>(m, w, v, out);
    case kSquare | kPlain | kDot: return reduce<T, Wide, kSquare | kPlain | kDot>(m, w, v, out);
    case kSquare | kDot: return reduce<T, Wide, kSquare | kDot>(m, w, v, out);
    default:
      if constexpr (sizeof(Wide) == sizeof(double)) {
        if (w.scale != nullptr) return reduce<T, Wide, kSquare | kScale>(m, w, v, out);
      }
      return out.sample ? reduce<T, Wide, kSquare | kSample>(m, w, v, out)
                        : reduce<T, Wide, kSquare>(m, w, v, out);
  }
}

template <typename T>
void reduce(
    Precision precision, const MatrixView& m, const Weights& w, const Weights& v,
    const RowSums& out) {
  return precision == Precision::fast ? reduce<T, float>(m, w, v, out)
                                      : reduce<T, double>(m, w, v, out);
}

void rows(
    Element element, Precision precision, const MatrixView& m, const Weights& w, const Weights& v,
    const RowSums& out) {
#if defined(HOLDFAST_AVX512BF16)
  if (reduced_bf16(element, precision, m, w, v, out)) return;
#endif
  switch (element) {
    case Element::f64: return reduce<double, double>(m, w, v, out);
    case Element::f32: return reduce<float>(precision, m, w, v, out);
    case Element::f16: return reduce<Half>(precision, m, w, v, out);
    case Element::bf16: return reduce<BFloat16>(precision, m, w, v, out);
  }
}

void cross(Element element, const MatrixView& m, const CrossSums& sums) {
  switch (element) {
    case Element::f32: return cross<float>(m, sums);
    case Element::f16: return cross<Half>(m, sums);
    case Element::bf16: return cross<BFloat16>(m, sums);
    case Element::f64: __builtin_unreachable();  // its partial sums need more than fp32
  }
}

}  // namespace

const Reductions HOLDFAST_OF_SET(reductions){&rows,     &cross,  &mixed,
                                             &smallest, &narrow, HOLDFAST_NAME};

}  // namespace holdfast
