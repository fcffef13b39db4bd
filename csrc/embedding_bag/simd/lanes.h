// One register of fp32 values for kernels.h, and how a row's elements are loaded into it. At least
// 12 bytes follow the codes of a row, so that a whole register of them may be read.
#pragma once

// A product and the sum it goes into must stay two roundings.
#pragma GCC optimize("fp-contract=off")
#if HOLDFAST_BYTES == 64
// GCC's own header reads what it left undefined on purpose (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#include "embedding_bag/rows.h"

#if HOLDFAST_BYTES > 16
#include <immintrin.h>
#endif

namespace holdfast {
namespace {

template <typename T>
inline T read(const void* from) {
  T value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}

// By integers: as a float that is yet to be scaled a subnormal would be flushed to zero where the
// caller has denormals flushed.
inline float half_value(uint16_t bits) {
  const uint32_t magnitude = bits & 0x7fffu, sign = uint32_t{bits & 0x8000u} << 16;
  const uint32_t rebias = magnitude >= 0x7c00u ? 0x70000000u : 0x38000000u;
  const uint32_t subnormal =
      __builtin_bit_cast(uint32_t, static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  const uint32_t size = magnitude < 0x0400u ? subnormal : (magnitude << 13) + rebias;
  return __builtin_bit_cast(float, size | sign);
}

// Returns whether x rounds to fp16 h: the same infinity, a NaN of any payload, else within half a
// unit.
inline bool faithful(float x, uint16_t h) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, x), magnitude = bits & 0x7fffffffu;
  const uint32_t infinity = (bits >> 16 & 0x8000u) | 0x7c00u;
  const float off = half_value(h) - x, size = __builtin_bit_cast(float, magnitude);
  const bool near = (off < 0 ? -off : off) <= size * 0x1p-11f + 0x1p-25f;
  const bool overflow = magnitude >= 0x477ff000u, nan = magnitude > 0x7f800000u;  // 65520
  return nan ? (h & 0x7fffu) > 0x7c00u : overflow ? h == infinity : near;
}

#if HOLDFAST_BYTES == 64

using Vec = __m512;
constexpr int64_t kLanes = 16;
constexpr int64_t kMostVectors = 16;
inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec broadcast(float x) { return _mm512_set1_ps(x); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec load_floats(const void* from) { return _mm512_loadu_ps(from); }
inline void store_floats(float* to, Vec v) { _mm512_storeu_ps(to, v); }
inline double total(Vec v) { return _mm512_reduce_add_ps(v); }
inline Vec first_of(Vec v, int64_t count) {
  return _mm512_maskz_mov_ps(static_cast<__mmask16>((1u << count) - 1), v);
}
template <RowKind K>
inline Vec load(const uint8_t* row, int64_t column) {
  if constexpr (K == RowKind::f32) return load_floats(row + 4 * column);
  if constexpr (K == RowKind::f16) return _mm512_cvtph_ps(read<__m256i>(row + 2 * column));
  if constexpr (K == RowKind::bf16) {
    const __m512i wide = _mm512_cvtepu16_epi32(read<__m256i>(row + 2 * column));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }
  __m128i codes;
  if constexpr (K == RowKind::u8) {
    codes = read<__m128i>(row + column);
  } else {
    const __m128i pairs = _mm_cvtsi64_si128(read<int64_t>(row + column / 2));
    const __m128i low = _mm_set1_epi8(15);
    codes =
        _mm_unpacklo_epi8(_mm_and_si128(pairs, low), _mm_and_si128(_mm_srli_epi16(pairs, 4), low));
  }
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(codes));
}
using Wide = __m512d;
inline Wide wide_zero() { return _mm512_setzero_pd(); }
inline double wide_total(Wide v) { return _mm512_reduce_add_pd(v); }
inline void add_wide(Wide& sums, Vec x) {
  const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1));
  sums = _mm512_add_pd(sums, _mm512_cvtps_pd(_mm512_castps512_ps256(x)));
  sums = _mm512_add_pd(sums, _mm512_cvtps_pd(high));
}
inline void store_half(uint16_t* to, Vec v) {
  constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  const __m256i rounded = _mm512_maskz_cvtps_ph(0xffff, v, nearest);
  __builtin_memcpy(to, &rounded, sizeof rounded);
}

#elif HOLDFAST_BYTES == 32

using Vec = __m256;
constexpr int64_t kLanes = 8;
constexpr int64_t kMostVectors = 8;
inline Vec zero() { return _mm256_setzero_ps(); }
inline Vec broadcast(float x) { return _mm256_set1_ps(x); }
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec load_floats(const void* from) { return read<__m256>(from); }
inline void store_floats(float* to, Vec v) { _mm256_storeu_ps(to, v); }
inline double total(Vec v) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline Vec first_of(Vec v, int64_t count) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i kept = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), lane);
  return _mm256_and_ps(v, _mm256_castsi256_ps(kept));
}
template <RowKind K>
inline Vec load(const uint8_t* row, int64_t column) {
  if constexpr (K == RowKind::f32) return load_floats(row + 4 * column);
  if constexpr (K == RowKind::f16) return _mm256_cvtph_ps(read<__m128i>(row + 2 * column));
  if constexpr (K == RowKind::bf16) {
    const __m256i wide = _mm256_cvtepu16_epi32(read<__m128i>(row + 2 * column));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
  __m128i codes;
  if constexpr (K == RowKind::u8) {
    codes = _mm_cvtsi64_si128(read<int64_t>(row + column));
  } else {
    const __m128i pairs = _mm_cvtsi32_si128(read<int32_t>(row + column / 2));
    const __m128i low = _mm_set1_epi8(15);
    codes =
        _mm_unpacklo_epi8(_mm_and_si128(pairs, low), _mm_and_si128(_mm_srli_epi16(pairs, 4), low));
  }
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(codes));
}
using Wide = __m256d;
inline Wide wide_zero() { return _mm256_setzero_pd(); }
inline double wide_total(Wide v) { return v[0] + v[1] + (v[2] + v[3]); }
inline void add_wide(Wide& sums, Vec x) {
  sums = _mm256_add_pd(sums, _mm256_cvtps_pd(_mm256_castps256_ps128(x)));
  sums = _mm256_add_pd(sums, _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)));
}
inline void store_half(uint16_t* to, Vec v) {
  const __m128i rounded = _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __builtin_memcpy(to, &rounded, sizeof rounded);
}

#else

constexpr int64_t kLanes = 8;
constexpr int64_t kMostVectors = 8;
struct Vec {
  float x[kLanes];
};
template <typename Call>
inline Vec each(const Call& call) {
  Vec v;
  for (int64_t i = 0; i < kLanes; ++i) v.x[i] = call(i);
  return v;
}
inline Vec zero() {
  return each([](int64_t) { return 0.0f; });
}
inline Vec broadcast(float x) {
  return each([&](int64_t) { return x; });
}
inline Vec add(const Vec& a, const Vec& b) {
  return each([&](int64_t i) { return a.x[i] + b.x[i]; });
}
inline Vec mul(const Vec& a, const Vec& b) {
  return each([&](int64_t i) { return a.x[i] * b.x[i]; });
}
inline Vec fma(const Vec& a, const Vec& b, const Vec& c) {
  return each([&](int64_t i) { return __builtin_fmaf(a.x[i], b.x[i], c.x[i]); });
}
inline Vec load_floats(const void* from) { return read<Vec>(from); }
inline void store_floats(float* to, const Vec& v) { __builtin_memcpy(to, &v, sizeof v); }
inline double total(const Vec& v) {
  double sum = 0;
  for (const float x : v.x) sum += x;
  return sum;
}
inline Vec first_of(const Vec& v, int64_t count) {
  return each([&](int64_t i) { return i < count ? v.x[i] : 0.0f; });
}
template <RowKind K>
inline Vec load(const uint8_t* row, int64_t column) {
  return each([&](int64_t i) -> float {
    const int64_t j = column + i;
    switch (K) {
      case RowKind::u8: return row[j];
      case RowKind::u4: return j % 2 ? row[j / 2] >> 4 : row[j / 2] & 15;
      case RowKind::f32: return read<float>(row + 4 * j);
      case RowKind::f16: return half_value(read<uint16_t>(row + 2 * j));
      default: return __builtin_bit_cast(float, uint32_t{read<uint16_t>(row + 2 * j)} << 16);
    }
  });
}
using Wide = double;
inline Wide wide_zero() { return 0; }
inline double wide_total(Wide v) { return v; }
inline void add_wide(Wide& sums, const Vec& v) {
  for (const float x : v.x) sums += x;
}
inline uint16_t half_bits(float x) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, x), sign = bits >> 16 & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {  // subnormal: the addition rounds to multiples of 2^-24
    const float shifted = __builtin_bit_cast(float, magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (__builtin_bit_cast(uint32_t, shifted) - 0x3f000000u));
  }
  const uint32_t even = magnitude + 0xfffu + (magnitude >> 13 & 1u);
  return static_cast<uint16_t>(sign | ((even - 0x38000000u) >> 13));
}
inline void store_half(uint16_t* to, const Vec& v) {
  for (int64_t i = 0; i < kLanes; ++i) to[i] = half_bits(v.x[i]);
}

#endif

template <int N>
struct Width {
  static constexpr int value = N;
};
template <RowKind K>
struct Kind {
  static constexpr RowKind value = K;
};

// A CRC-32C, of which the lowest byte is stored. Every single flipped bit changes that byte.
inline uint32_t guard(uint64_t parameters, uint32_t sum) {
#if HOLDFAST_BYTES > 16
  const auto of_parameters = static_cast<uint32_t>(_mm_crc32_u64(0, parameters));
  return _mm_crc32_u32(of_parameters, sum);
#else
  return guard_of(parameters, sum);
#endif
}

template <RowKind K>
inline Vec load_some(const uint8_t* row, int64_t column, int64_t count) {
  if constexpr (quantised(K)) {
    return load<K>(row, column);
  } else {
    constexpr int64_t size = K == RowKind::f32 ? 4 : 2;
    uint8_t some[4 * kLanes] = {};
    __builtin_memcpy(some, row + size * column, static_cast<size_t>(size * count));
    return load<K>(some, 0);
  }
}

inline void store(float* to, const Vec& v, int64_t count) {
  if (count == kLanes) return store_floats(to, v);
  float some[kLanes];
  store_floats(some, v);
  __builtin_memcpy(to, some, sizeof(float) * static_cast<size_t>(count));
}

inline Vec load_first(const float* from, int64_t count) {
  if (count == kLanes) return load_floats(from);
  return load_some<RowKind::f32>(reinterpret_cast<const uint8_t*>(from), 0, count);
}

}  // namespace
}  // namespace holdfast
