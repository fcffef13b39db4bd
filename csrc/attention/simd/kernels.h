// The passes of attention/passes.h, compiled once for each instruction set (core/simd/vectors.h).
#include "attention/passes.h"
#include "core/simd/vectors.h"

// Hides a value from the optimiser, so that computations repeated on purpose are not merged and a
// sum is rounded in the same way everywhere.
#if defined(__x86_64__)
#define HOLDFAST_OPAQUE(v) asm volatile("" : "+v"(v))
#elif defined(__aarch64__)
#define HOLDFAST_OPAQUE(v) asm volatile("" : "+w"(v))
#else
#define HOLDFAST_OPAQUE(v) asm volatile("" : "+m"(v))
#endif

namespace holdfast {
namespace {

template <typename T>
struct Simd;

template <>
struct Simd<float> {
  typedef float V __attribute__((vector_size(kBytes)));
  typedef int32_t I __attribute__((vector_size(kBytes)));
  typedef uint32_t U __attribute__((vector_size(kBytes)));
  typedef uint8_t Bytes __attribute__((vector_size(kBytes / 4)));
  using Word = uint32_t;
  static constexpr Word kOne = 0x3f800000u;
};

template <>
struct Simd<double> {
  typedef double V __attribute__((vector_size(kBytes)));
  typedef int64_t I __attribute__((vector_size(kBytes)));
  typedef uint64_t U __attribute__((vector_size(kBytes)));
  typedef uint8_t Bytes __attribute__((vector_size(kBytes / 8)));
  using Word = uint64_t;
  static constexpr Word kOne = 0x3ff0000000000000u;
};

template <typename T>
using Vec = typename Simd<T>::V;
template <typename T>
constexpr int64_t kLanes = kBytes / static_cast<int64_t>(sizeof(T));
template <typename T>  // at least as large as any square that underflows
constexpr T kTiny = sizeof(T) == 8 ? T(0x1p-1022) : T(0x1p-126);
template <typename T>
constexpr T kInfinity = static_cast<T>(__builtin_inf());

template <typename T>
inline Vec<T> load(const T* from) {
  return raw<Vec<T>>(from);
}
template <typename T>
inline void store(T* to, const Vec<T>& v) {
  __builtin_memcpy(to, &v, sizeof v);
}
// Loads the first `count` lanes and sets the others to zero.
template <typename T>
inline Vec<T> load_some(const T* from, int64_t count) {
  T lanes[kLanes<T>] = {};
  for (int64_t l = 0; l < count; ++l) lanes[l] = from[l];
  return load(lanes);
}
template <typename T>
inline void store_some(T* to, const Vec<T>& v, int64_t count) {
  T lanes[kLanes<T>];
  store(lanes, v);
  for (int64_t l = 0; l < count; ++l) to[l] = lanes[l];
}
template <typename T>
inline Vec<T> load_at_most(const T* from, int64_t count) {
  return count >= kLanes<T> ? load(from) : load_some(from, count);
}

template <typename T>
inline typename Simd<T>::I below(int64_t count) {
  typename Simd<T>::I lane;
  for (int64_t l = 0; l < kLanes<T>; ++l) lane[l] = static_cast<decltype(+lane[0])>(l);
  return lane < static_cast<decltype(+lane[0])>(count);
}

template <typename T>
inline T largest(const Vec<T>& v) {
  T most = v[0];
  for (int64_t l = 1; l < kLanes<T>; ++l) most = v[l] > most ? v[l] : most;
  return most;
}
template <typename T>
inline typename Simd<T>::Word largest_bits(const typename Simd<T>::U& v) {
  auto most = v[0];
  for (int64_t l = 1; l < kLanes<T>; ++l) most = v[l] > most ? v[l] : most;
  return most;
}
template <typename T>
inline typename Simd<T>::Word bits_of(T value) {
  typename Simd<T>::Word bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}

// The terms of p in e^r = 1 + r + r² p(r), the highest power first, and ln 2 in two parts.
template <typename T>
struct Exponential;
template <>
struct Exponential<float> {  // p is fitted for the least relative error
  static constexpr float kLeast = -87.0f, kMost = 88.0f, kShift = 0x1.8p23f;
  static constexpr float kHigh = 0.693359375f, kLow = -2.12194440e-4f;
  static constexpr float kTerms[] = {
      0.0013814467f, 0.0083687808f, 0.041668393f, 0.16666520f, 0.49999994f};
  static constexpr int64_t kCount = sizeof kTerms / sizeof *kTerms;
};
template <>
struct Exponential<double> {  // Taylor's series: r¹⁴/14! is below half a unit in the last place
  static constexpr double kLeast = -708.0, kMost = 709.0, kShift = 0x1.8p52;
  static constexpr double kHigh = 0x1.62e42fee00000p-1, kLow = 1.90821492927058770002e-10;
  static constexpr double kTerms[] = {
      1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320,
      1.0 / 5040,       1.0 / 720,       1.0 / 120,      1.0 / 24,      1.0 / 6,      0.5};
  static constexpr int64_t kCount = sizeof kTerms / sizeof *kTerms;
};

// e^x within one unit in the last place; 0 below the normal numbers, exactly 1 at 0, NaN of NaN.
// e^x = 2^n e^r with |r| ≤ ln 2 / 2.
template <typename T>
inline Vec<T> exponential(const Vec<T>& given) {
  using E = Exponential<T>;
  using V = Vec<T>;
  using I = typename Simd<T>::I;
  const V x = given > E::kMost ? V{} + E::kMost : given;
  V shifted = x * static_cast<T>(1.4426950408889634) + E::kShift;
  HOLDFAST_OPAQUE(shifted);
  const V n = shifted - E::kShift;
  const V r = (x - n * E::kHigh) - n * E::kLow;
  V p = V{} + E::kTerms[0];
#pragma GCC unroll 12
  for (int64_t k = 1; k < E::kCount; ++k) p = p * r + E::kTerms[k];
  const V unscaled = (p * r) * r + r + T(1);
  const V scaled = (V)((I)unscaled + ((I)shifted << (sizeof(T) == 8 ? 52 : 23)));
  const V result = x < E::kLeast ? V{} : scaled;
  return x == x ? result : x;
}

// It is not inlined, so that it returns the same bits at every call.
template <typename T>
__attribute__((noinline)) T exponential_of(T x) {
  return exponential<T>(Vec<T>{} + x)[0];
}

// Computes scale · s + mask for one vector of columns, with the same bits in every pass.
template <bool masked, typename T>
inline Vec<T> shifted_scores(const Vec<T>& s, const T* mask, int64_t count, T scale) {
  Vec<T> t = s * scale;
  HOLDFAST_OPAQUE(t);  // prevents fusion with the addition
  if constexpr (masked) {
    t += load_at_most(mask, count);
    HOLDFAST_OPAQUE(t);
  }
  return t;
}

// Rounds to bf16, to nearest even.
inline Vec<float> as_bf16(const Vec<float>& x) {
  using U = Simd<float>::U;
  const U bits = (U)x;
  const Vec<float> rounded = (Vec<float>)((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
  return x == x ? rounded : x;
}
template <bool narrow, typename T>
inline Vec<T> stored(const Vec<T>& x) {
  if constexpr (narrow && sizeof(T) == sizeof(float))
    return as_bf16(x);
  else
    return x;
}

// Returns what dropout multiplies a vector of probabilities by; beyond `count` it is zero.
template <typename T>
inline Vec<T> dropout_factors(
    const TileDropout<T>& dropout, int64_t row, int64_t j, int64_t count) {
  using Bytes = typename Simd<T>::Bytes;
  const uint8_t* from = dropout.kept + row * dropout.stride + j;
  Bytes kept{};
  if (count >= kLanes<T>) {
    __builtin_memcpy(&kept, from, sizeof kept);
  } else {
    for (int64_t l = 0; l < count; ++l) kept[l] = from[l];
  }
  return __builtin_convertvector(kept, Vec<T>) * dropout.factor;
}

constexpr int64_t kUnroll = 4;

template <typename T>
inline Vec<T> combined(const Vec<T> (&parts)[kUnroll]) {
  return (parts[0] + parts[1]) + (parts[2] + parts[3]);
}

// Σ_j x_j r_j over whole vectors.
template <typename T>
inline T signed_sum(const T* x, const T* signs, int64_t from, int64_t to) {
  Vec<T> sum[kUnroll] = {};
  int64_t j = from;
  for (; j + kUnroll * kLanes<T> <= to; j += kUnroll * kLanes<T>) {
    for (int64_t u = 0; u < kUnroll; ++u) {
      const int64_t at = j + u * kLanes<T>;
      sum[u] += load(x + at) * load(signs + at);
    }
  }
  for (; j < to; j += kLanes<T>) sum[0] += load(x + j) * load(signs + j);
  return total(combined<T>(sum));
}

inline bool within(float residual, float limit) { return __builtin_fabsf(residual) <= limit; }
inline bool within(double residual, double limit) { return __builtin_fabs(residual) <= limit; }

template <typename T>
inline int64_t seen(const TileMask<T>& mask, int64_t row, int64_t columns) {
  const int64_t count = row + mask.diagonal;
  return count < 0 ? 0 : count < columns ? count : columns;
}

template <typename T>
struct Reading {
  T sum, most;  // Σ_j r_j S_ij over all columns; max of scale S + mask over those seen
};

template <bool masked, typename T>
inline Reading<T> read_scores(const SoftmaxTile<T>& tile, int64_t row, int64_t count) {
  const T* s = tile.scores + row * tile.stride;
  const T* mask = masked ? tile.mask.values + row * tile.mask.stride : nullptr;
  Vec<T> sum[kUnroll] = {}, most[kUnroll];
  for (auto& each : most) each = Vec<T>{} - kInfinity<T>;
  const auto step = [&](int64_t u, int64_t j) {
    const Vec<T> x = load(s + j);
    sum[u] += x * load(tile.signs + j);
    const Vec<T> t = shifted_scores<masked>(x, mask + (masked ? j : 0), kLanes<T>, tile.scale);
    most[u] = t > most[u] ? t : most[u];
  };
  int64_t j = 0;
  for (; j + kUnroll * kLanes<T> <= count; j += kUnroll * kLanes<T>) {
    for (int64_t u = 0; u < kUnroll; ++u) step(u, j + u * kLanes<T>);
  }
  for (; j + kLanes<T> <= count; j += kLanes<T>) step(0, j);
  if (j < count) {
    const Vec<T> x = load(s + j);
    sum[0] += x * load(tile.signs + j);
    const Vec<T> t = shifted_scores<masked>(x, mask + (masked ? j : 0), count - j, tile.scale);
    const Vec<T> kept = below<T>(count - j) ? t : Vec<T>{} - kInfinity<T>;
    most[1] = kept > most[1] ? kept : most[1];
    j += kLanes<T>;
  }
  for (; j < tile.padded; j += kLanes<T>) sum[2] += load(s + j) * load(tile.signs + j);
  for (int64_t u = 1; u < kUnroll; ++u) most[0] = most[u] > most[0] ? most[u] : most[0];
  return {total(combined<T>(sum)), largest<T>(most[0])};
}

template <bool masked, typename T>
bool any_nan(const SoftmaxTile<T>& tile, int64_t row, int64_t count) {
  const T* s = tile.scores + row * tile.stride;
  for (int64_t j = 0; j < count; ++j) {
    const T t = masked ? s[j] * tile.scale + tile.mask.values[row * tile.mask.stride + j] : s[j];
    if (t != t) return true;
  }
  return false;
}

template <typename T>
struct Exponentials {
  T sum, copy, carry, cross;
  T weight;  // at least Σ_j D_ij²
  // The bits of the largest value; they exceed those of 1 if a value is outside [0, 1].
  typename Simd<T>::Word most;
};

template <bool masked, bool narrow, bool dropped, typename T>
inline Exponentials<T> write_probabilities(
    const SoftmaxTile<T>& tile, int64_t row, int64_t count, T maximum) {
  using U = typename Simd<T>::U;
  T* s = tile.scores + row * tile.stride;
  const T* mask = masked ? tile.mask.values + row * tile.mask.stride : nullptr;
  Vec<T> sum[2] = {}, copy[2] = {}, carry[2] = {}, cross[2] = {}, left{};
  U most[2] = {};
  Vec<T> one = Vec<T>{} + T(1);
  HOLDFAST_OPAQUE(one);
  const auto step = [&](int64_t u, int64_t j, const Vec<T>& t) {
    const Vec<T> p = exponential<T>(t - maximum);
    Vec<T> kept = p;
    if constexpr (dropped) {
      kept *= dropout_factors(tile.dropout, row, j, count - j);
      HOLDFAST_OPAQUE(kept);
      left += kept;
    }
    kept = stored<narrow, T>(kept);
    store(s + j, kept);
    sum[u] += p;
    copy[u] += p * one;
    carry[u] += kept * load(tile.value_sums + j);
    cross[u] += kept * load(tile.cross_sums + j);
    const U bits = (U)p;
    most[u] = bits > most[u] ? bits : most[u];
  };
  int64_t j = 0;
  for (; j + 2 * kLanes<T> <= count; j += 2 * kLanes<T>) {
    for (int64_t u = 0; u < 2; ++u) {
      const int64_t at = j + u * kLanes<T>;
      const T* add = mask + (masked ? at : 0);
      step(u, at, shifted_scores<masked>(load(s + at), add, kLanes<T>, tile.scale));
    }
  }
  for (; j < count; j += kLanes<T>) {
    const T* add = mask + (masked ? j : 0);
    const Vec<T> t = shifted_scores<masked>(load(s + j), add, count - j, tile.scale);
    step(0, j, below<T>(count - j) ? t : Vec<T>{} - kInfinity<T>);
  }
  for (; j < tile.padded; j += kLanes<T>) store(s + j, Vec<T>{});
  most[0] = most[1] > most[0] ? most[1] : most[0];
  const T whole = total(sum[0] + sum[1]);
  return {
      whole,
      total(copy[0] + copy[1]),
      total(carry[0] + carry[1]),
      total(cross[0] + cross[1]),
      dropped ? total(left) * tile.dropout.factor : whole,
      largest_bits<T>(most[0])};
}

template <typename T>
inline void scale_row(T* row, int64_t width, T factor) {
  int64_t j = 0;
  for (; j + kLanes<T> <= width; j += kLanes<T>) store(row + j, load(row + j) * factor);
  for (; j < width; ++j) row[j] *= factor;
}

template <typename T>
inline bool agree(const SoftmaxState<T>& state, int64_t row) {
  return bits_of(state.maximum[row]) == bits_of(state.maximum_copy[row]) &&
      bits_of(state.sum[row]) == bits_of(state.sum_copy[row]);
}

// Calls the variant of a pass that a tile needs.
template <typename Tile, typename Run>
inline RowVerdict choose(const Tile& tile, const Run& run) {
  const auto with = [&]<bool masked, bool narrow>() {
    return tile.dropout.kept != nullptr ? run.template operator()<masked, narrow, true>()
                                        : run.template operator()<masked, narrow, false>();
  };
  if (tile.mask.values != nullptr) {
    return tile.narrow ? with.template operator()<true, true>()
                       : with.template operator()<true, false>();
  }
  return tile.narrow ? with.template operator()<false, true>()
                     : with.template operator()<false, false>();
}

template <bool masked, bool narrow, bool dropped, typename T>
RowVerdict softmax(const SoftmaxTile<T>& tile, int64_t first, int64_t cleared) {
  using Word = typename Simd<T>::Word;
  const SoftmaxState<T>& state = tile.state;
  for (int64_t i = first; i < tile.rows; ++i) {
    const bool checked = tile.excused[i] == 0;
    const int64_t count = seen(tile.mask, i, tile.columns);
    const Reading<T> read = read_scores<masked>(tile, i, count);
    if (checked && i >= cleared && !within(read.sum - tile.expected[i], tile.limit[i])) {
      return {i, Wrong::scores};
    }
    if (checked && !agree(state, i)) return {i, Wrong::state};
    const T before = state.maximum[i];
    const T maximum = read.most > before ? read.most : before;
    if (maximum == -kInfinity<T> && !any_nan<masked>(tile, i, count)) {
      T* row = tile.scores + i * tile.stride;  // the row attends to no key so far
      for (int64_t j = 0; j < tile.padded; j += kLanes<T>) store(row + j, Vec<T>{});
      continue;
    }
    const T factor = exponential_of<T>(before - maximum);
    T again = before;
    HOLDFAST_OPAQUE(again);
    const T factor_copy = exponential_of<T>(again - maximum);
    const Exponentials<T> p = write_probabilities<masked, narrow, dropped>(tile, i, count, maximum);
    if (checked) {
      const Word top = Simd<T>::kOne;
      const bool attained = read.most < maximum || p.most == top;
      if (p.most > top || !attained) return {i, Wrong::probabilities};
      if (!(factor >= 0 && factor <= 1 && maximum >= before) ||
          bits_of(factor) != bits_of(factor_copy)) {
        return {i, Wrong::state};
      }
    }
    state.maximum[i] = state.maximum_copy[i] = maximum;
    T sum = state.sum[i] * factor, sum_copy = state.sum_copy[i] * factor_copy;
    HOLDFAST_OPAQUE(sum);
    HOLDFAST_OPAQUE(sum_copy);
    state.sum[i] = sum + p.sum;
    state.sum_copy[i] = sum_copy + p.copy;
    state.carry[i] = state.carry[i] * factor + p.carry;
    state.cross[i] = state.cross[i] * factor + p.cross;
    state.weight[i] = state.weight[i] * factor * factor + tile.largest * p.weight;
    if (tile.output != nullptr && factor != 1) {
      scale_row(tile.output + i * tile.width, tile.width, factor);
    }
  }
  return {tile.rows, Wrong::nothing};
}

template <typename T>
RowVerdict softmax(const SoftmaxTile<T>& tile, int64_t first, int64_t cleared) {
  return choose(tile, [&]<bool masked, bool narrow, bool dropped>() {
    return softmax<masked, narrow, dropped>(tile, first, cleared);
  });
}

template <typename T>
struct GradientSums {
  Vec<T> p_signed{}, p_square{}, p_sum{}, p_dot{}, s_signed{}, s_square{}, s_sum{}, carry{};
  typename Simd<T>::U most{};
};

template <bool masked, bool narrow, bool dropped, typename T>
RowVerdict gradient(
    const GradientTile<T>& tile, int64_t first, int64_t cleared_scores, int64_t cleared_gradients) {
  using Row = GradientRow;
  for (int64_t i = first; i < tile.rows; ++i) {
    T* s = tile.scores + i * tile.stride;
    T* g = tile.gradients + i * tile.stride;
    const bool checked = tile.excused[i] == 0;
    if (checked && i >= cleared_scores) {
      const T sum = signed_sum(s, tile.signs, 0, tile.padded);
      if (!within(sum - tile.row(Row::expected_scores)[i], tile.row(Row::limit_scores)[i]))
        return {i, Wrong::scores};
    }
    if (checked && i >= cleared_gradients) {
      const T sum = signed_sum(g, tile.signs, 0, tile.padded);
      if (!within(sum - tile.row(Row::expected_gradients)[i], tile.row(Row::limit_gradients)[i])) {
        return {i, Wrong::grad_probabilities};
      }
    }
    const int64_t count = seen(tile.mask, i, tile.columns);
    const T* mask = masked ? tile.mask.values + i * tile.mask.stride : nullptr;
    const T lse = tile.row(Row::lse)[i], delta = tile.row(Row::delta)[i];
    GradientSums<T> sums[2];
    const auto step = [&](GradientSums<T>& part, int64_t j, const Vec<T>& t) {
      using U = typename Simd<T>::U;
      const Vec<T> whole = exponential<T>(t - lse);
      Vec<T> p = whole, dp = load(g + j);
      if constexpr (dropped) {
        const Vec<T> factors = dropout_factors(tile.dropout, i, j, count - j);
        p *= factors;
        dp *= factors;
        HOLDFAST_OPAQUE(dp);
      }
      p = stored<narrow, T>(p);
      const Vec<T> change = whole * (dp - delta);
      const Vec<T> ds = stored<narrow, T>(change);
      store(s + j, p);
      store(g + j, ds);
      const Vec<T> sign = load(tile.signs + j);
      part.p_signed += p * sign;
      part.p_square += p * p;
      part.p_sum += whole;
      part.p_dot += whole * dp;
      part.s_signed += ds * sign;
      part.s_square += ds * ds;
      part.s_sum += change;
      part.carry += ds * load(tile.key_sums + j);
      const U bits = (U)whole;
      part.most = bits > part.most ? bits : part.most;
    };
    int64_t j = 0;
    for (; j + 2 * kLanes<T> <= count; j += 2 * kLanes<T>) {
      for (int64_t u = 0; u < 2; ++u) {
        const int64_t at = j + u * kLanes<T>;
        const T* add = mask + (masked ? at : 0);
        step(sums[u], at, shifted_scores<masked>(load(s + at), add, kLanes<T>, tile.scale));
      }
    }
    for (; j < count; j += kLanes<T>) {
      const T* add = mask + (masked ? j : 0);
      const Vec<T> t = shifted_scores<masked>(load(s + j), add, count - j, tile.scale);
      const auto kept = below<T>(count - j);
      store(g + j, kept ? load(g + j) : Vec<T>{});
      step(sums[0], j, kept ? t : Vec<T>{} - kInfinity<T>);
    }
    for (; j < tile.padded; j += kLanes<T>) {
      store(s + j, Vec<T>{});
      store(g + j, Vec<T>{});
    }
    sums[0].most = sums[1].most > sums[0].most ? sums[1].most : sums[0].most;
    // Written so that a NaN, whose bits are above all others, counts.
    if (checked && largest_bits<T>(sums[0].most) > bits_of(tile.row(Row::most)[i])) {
      return {i, Wrong::probabilities};
    }
    tile.row(Row::p_signed)[i] = total(sums[0].p_signed + sums[1].p_signed);
    const T lost = static_cast<T>(tile.padded) * kTiny<T>;
    tile.row(Row::p_square)[i] = total(sums[0].p_square + sums[1].p_square) + lost;
    tile.row(Row::p_sum)[i] = total(sums[0].p_sum + sums[1].p_sum);
    tile.row(Row::p_dot)[i] = total(sums[0].p_dot + sums[1].p_dot);
    tile.row(Row::s_sum)[i] = total(sums[0].s_sum + sums[1].s_sum);
    tile.row(Row::p_total)[i] += tile.row(Row::p_sum)[i];
    tile.row(Row::s_signed)[i] = total(sums[0].s_signed + sums[1].s_signed);
    tile.row(Row::s_square)[i] = total(sums[0].s_square + sums[1].s_square) + lost;
    tile.row(Row::carry)[i] += total(sums[0].carry + sums[1].carry);
  }
  return {tile.rows, Wrong::nothing};
}

template <typename T>
RowVerdict gradient(
    const GradientTile<T>& tile, int64_t first, int64_t cleared_scores, int64_t cleared_gradients) {
  return choose(tile, [&]<bool masked, bool narrow, bool dropped>() {
    return gradient<masked, narrow, dropped>(tile, first, cleared_scores, cleared_gradients);
  });
}

template <typename T>
void dots(
    const T* a, int64_t rows, int64_t width, int64_t stride, const T* w, const T* z, T* dot,
    T* square) {
  for (int64_t i = 0; i < rows; ++i) {
    Vec<T> sum{}, squares{};
    for (int64_t k = 0; k < width; k += kLanes<T>) {
      const Vec<T> x = load_at_most(a + i * stride + k, width - k);
      sum += x * load_at_most(w + k, width - k);
      squares += x * x * load_at_most(z + k, width - k);
    }
    dot[i] = total(sum);
    square[i] = total(squares);
  }
}

template <typename T>
void columns(
    const T* a, int64_t rows, int64_t width, int64_t stride, const T* u, const T* y, T* sum,
    T* square) {
  for (int64_t k = 0; k < width; k += kLanes<T>) {
    Vec<T> sums{}, squares{};
    for (int64_t i = 0; i < rows; ++i) {
      const Vec<T> x = load_at_most(a + i * stride + k, width - k);
      sums += x * u[i];
      squares += (x * x + kTiny<T>)*y[i];
    }
    const int64_t count = width - k < kLanes<T> ? width - k : kLanes<T>;
    store_some(sum + k, load_some(sum + k, count) + sums, count);
    store_some(square + k, load_some(square + k, count) + squares, count);
  }
}

template <typename T>
void finish(
    T* a, int64_t rows, int64_t width, int64_t stride, const T* factor, const T* signs, T* sum,
    T* square, const T* cross_signs, T* cross) {
  for (int64_t i = 0; i < rows; ++i) {
    Vec<T> sums[kUnroll] = {}, squares[kUnroll] = {}, crosses{};
    T* row = a + i * stride;
    const auto step = [&](int64_t u, int64_t k, int64_t count) {
      const Vec<T> x = load_at_most(row + k, count) * factor[i];
      count == kLanes<T> ? store(row + k, x) : store_some(row + k, x, count);
      sums[u] += x * load_at_most(signs + k, count);
      squares[u] += x * x;
      if (cross != nullptr) crosses += x * load_at_most(cross_signs + k, count);
    };
    int64_t k = 0;
    for (; k + kUnroll * kLanes<T> <= width; k += kUnroll * kLanes<T>) {
      for (int64_t u = 0; u < kUnroll; ++u) step(u, k + u * kLanes<T>, kLanes<T>);
    }
    for (; k + kLanes<T> <= width; k += kLanes<T>) step(0, k, kLanes<T>);
    if (k < width) step(1, k, width - k);
    sum[i] = total(combined<T>(sums));
    square[i] = total(combined<T>(squares));
    if (cross != nullptr) cross[i] = total(crosses);
  }
}

template <typename T>
void inner(const T* a, const T* b, int64_t rows, int64_t width, int64_t stride, T* dot, T* copy) {
  for (int64_t i = 0; i < rows; ++i) {
    Vec<T> sum{}, again{};
    for (int64_t k = 0; k < width; k += kLanes<T>) {
      Vec<T> x = load_at_most(a + i * stride + k, width - k);
      const Vec<T> y = load_at_most(b + i * stride + k, width - k);
      Vec<T> product = x * y;  // made opaque, because one of the two sums might be fused
      HOLDFAST_OPAQUE(product);
      sum += product;
      HOLDFAST_OPAQUE(x);
      product = x * y;
      HOLDFAST_OPAQUE(product);
      again += product;
    }
    dot[i] = total(sum);
    copy[i] = total(again);
  }
}

template <typename T>
void sums(
    const T* a, int64_t rows, int64_t width, int64_t stride, const T* signs, T* sum, T* square,
    T* plain, const T* cross_signs, T* cross) {
  for (int64_t i = 0; i < rows; ++i) {
    Vec<T> sums{}, squares{}, plains{}, crosses{};
    for (int64_t k = 0; k < width; k += kLanes<T>) {
      const Vec<T> x = load_at_most(a + i * stride + k, width - k);
      sums += x * load_at_most(signs + k, width - k);
      squares += x * x;
      plains += x;
      if (cross != nullptr) crosses += x * load_at_most(cross_signs + k, width - k);
    }
    sum[i] = total(sums);
    square[i] = total(squares);
    plain[i] = total(plains);
    if (cross != nullptr) cross[i] = total(crosses);
  }
}

// Selects from two rows at distance `half` the lanes of the lower or, if `high`, the upper one.
template <typename T, int64_t half, bool high, int64_t... lane>
inline Vec<T> exchanged(const Vec<T>& a, const Vec<T>& b, Indices<lane...>) {
  using I = typename Simd<T>::I;
  constexpr int64_t n = kLanes<T>;
  if constexpr (high) {
    return __builtin_shuffle(a, b, I{((lane & half) == 0 ? lane + half : lane + n)...});
  } else {
    return __builtin_shuffle(a, b, I{((lane & half) == 0 ? lane : lane + n - half)...});
  }
}

template <typename T, int64_t half>
inline void exchange(Vec<T> (&rows)[kLanes<T>]) {
  if constexpr (half > 0) {
    using All = typename Upto<kLanes<T>>::Type;
    for (int64_t i = 0; i < kLanes<T>; ++i) {
      if ((i & half) != 0) continue;
      const Vec<T> a = rows[i], b = rows[i + half];
      rows[i] = exchanged<T, half, false>(a, b, All{});
      rows[i + half] = exchanged<T, half, true>(a, b, All{});
    }
    exchange<T, half / 2>(rows);
  }
}

// The two are not inlined, so that the addresses of one do not take the registers of the other.
template <typename T>
__attribute__((noinline)) void transpose_block(
    const T* from, int64_t stride, T* to, int64_t to_stride) {
  constexpr int64_t n = kLanes<T>;
  Vec<T> block[n];
  for (int64_t l = 0; l < n; ++l, from += stride) block[l] = load(from);
  exchange<T, n / 2>(block);
  for (int64_t l = 0; l < n; ++l, to += to_stride) store(to, block[l]);
}

template <typename T>
__attribute__((noinline)) void transpose_some(
    const T* from, int64_t rows, int64_t width, int64_t stride, T* to, int64_t to_stride) {
  for (int64_t k = 0; k < width; ++k) {
    for (int64_t i = 0; i < rows; ++i) to[k * to_stride + i] = from[i * stride + k];
  }
}

template <typename T>
void transpose(
    const T* from, int64_t rows, int64_t width, int64_t stride, T* to, int64_t to_stride) {
  constexpr int64_t n = kLanes<T>;
  for (int64_t i = 0; i < rows; i += n) {
    const int64_t some_rows = rows - i < n ? rows - i : n;
    for (int64_t k = 0; k < width; k += n) {
      const int64_t some = width - k < n ? width - k : n;
      const T* block = from + i * stride + k;
      T* out = to + k * to_stride + i;
      if (some_rows == n && some == n) {
        transpose_block(block, stride, out, to_stride);
      } else {
        transpose_some(block, some_rows, some, stride, out, to_stride);
      }
    }
  }
}

void narrow_rows(
    const float* from, int64_t rows, int64_t width, int64_t stride, uint16_t* to,
    int64_t to_stride) {
  typedef uint16_t Shorts __attribute__((vector_size(kBytes / 2)));
  using U = Simd<float>::U;
  for (int64_t i = 0; i < rows; ++i) {
    const float* row = from + i * stride;
    uint16_t* out = to + i * to_stride;
    int64_t j = 0;
    for (; j + kLanes<float> <= width; j += kLanes<float>) {
      const Shorts high = __builtin_convertvector((U)load(row + j) >> 16, Shorts);
      __builtin_memcpy(out + j, &high, sizeof high);
    }
    for (; j < width; ++j) out[j] = static_cast<uint16_t>(bits_of(row[j]) >> 16);
  }
}

void narrow_pairs(
    const float* from, int64_t rows, int64_t width, int64_t stride, uint16_t* to,
    int64_t to_stride) {
  using U = Simd<float>::U;
  for (int64_t i = 0; i < rows; i += 2) {
    const float *even = from + i * stride, *odd = even + stride;
    const bool both = i + 1 < rows;
    uint16_t* out = to + i * to_stride;
    int64_t j = 0;
    for (; both && j + kLanes<float> <= width; j += kLanes<float>) {
      const U pair = (U)load(even + j) >> 16 | ((U)load(odd + j) & 0xffff0000u);
      __builtin_memcpy(out + 2 * j, &pair, sizeof pair);
    }
    for (; j < width; ++j) {
      out[2 * j] = static_cast<uint16_t>(bits_of(even[j]) >> 16);
      out[2 * j + 1] = both ? static_cast<uint16_t>(bits_of(odd[j]) >> 16) : uint16_t{0};
    }
  }
}

inline uint32_t twisted(uint32_t one, uint32_t next) {
  const uint32_t mixed = (one & 0x80000000u) | (next & 0x7fffffffu);
  return mixed >> 1 ^ (-(next & 1u) & 0x9908b0dfu);
}

void advance(uint32_t* state) {
  constexpr int64_t n = 624, m = 397;
  for (int64_t j = 0; j < n - m; ++j) state[j] = state[j + m] ^ twisted(state[j], state[j + 1]);
  for (int64_t j = n - m; j < n - 1; ++j) {
    state[j] = state[j + m - n] ^ twisted(state[j], state[j + 1]);
  }
  state[n - 1] = state[m - 1] ^ twisted(state[n - 1], state[0]);
}

void temper(const uint32_t* state, int64_t count, uint32_t* to) {
  for (int64_t j = 0; j < count; ++j) {
    uint32_t y = state[j];
    y ^= y >> 11;
    y ^= y << 7 & 0x9d2c5680u;
    y ^= y << 15 & 0xefc60000u;
    to[j] = y ^ y >> 18;
  }
}

void below(const uint32_t* words, int64_t pairs, uint64_t limit, uint8_t* to) {
  constexpr uint64_t mask = (uint64_t{1} << 53) - 1;
  for (int64_t i = 0; i < pairs; ++i) {
    const uint64_t value = (uint64_t{words[2 * i]} << 32 | words[2 * i + 1]) & mask;
    to[i] = static_cast<uint8_t>((value - limit) >> 63);
  }
}

template <typename T>
constexpr TilePasses<T> kPasses{&softmax<T>, &gradient<T>, &dots<T>,      &columns<T>, &finish<T>,
                                &inner<T>,   &sums<T>,     &transpose<T>, kLanes<T>};

}  // namespace

const AttentionPasses HOLDFAST_OF_SET(attention_passes){
    kPasses<float>, kPasses<double>, &narrow_rows, &narrow_pairs,
    &advance,       &temper,         &below,       HOLDFAST_NAME};

}  // namespace holdfast
