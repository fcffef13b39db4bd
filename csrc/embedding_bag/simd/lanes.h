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

#include "core/simd/vectors.h"
#include "embedding_bag/rows.h"

#if HOLDFAST_BYTES > 16
#include <immintrin.h>
#endif

namespace holdfast {
namespace {

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

constexpr int64_t kWidth = kBytes > 16 ? kBytes : 32;  // A small register is used in pairs.
constexpr int64_t kLanes = kWidth / 4;
constexpr int64_t kMostVectors = kWidth == 64 ? 16 : 8;
typedef float Vec __attribute__((vector_size(kWidth)));
typedef double Wide __attribute__((vector_size(kWidth)));
typedef int32_t Ints __attribute__((vector_size(kWidth)));
typedef uint16_t Shorts __attribute__((vector_size(kWidth / 2)));

// Returns as integers what is stored in so many bits each.
template <int bits>
inline Ints integers(const uint8_t* from);

#if HOLDFAST_BYTES > 16
constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

// Two codes a byte, as a byte each.
inline __m128i unpacked(uint64_t pairs) {
  const __m128i both = _mm_cvtsi64_si128(static_cast<int64_t>(pairs)), low = _mm_set1_epi8(15);
  return _mm_unpacklo_epi8(_mm_and_si128(both, low), _mm_and_si128(_mm_srli_epi16(both, 4), low));
}
#endif
#if HOLDFAST_BYTES == 64
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec from_halves(Shorts x) { return _mm512_cvtph_ps((__m256i)x); }
inline Shorts to_halves(Vec x) { return (Shorts)_mm512_maskz_cvtps_ph(0xffff, x, kNearest); }
template <>
inline Ints integers<4>(const uint8_t* from) {
  return (Ints)_mm512_cvtepu8_epi32(unpacked(raw<uint64_t>(from)));
}
template <>
inline Ints integers<8>(const uint8_t* from) {
  return (Ints)_mm512_cvtepu8_epi32(raw<__m128i>(from));
}
template <>
inline Ints integers<16>(const uint8_t* from) {
  return (Ints)_mm512_cvtepu16_epi32(raw<__m256i>(from));
}
#elif HOLDFAST_BYTES == 32
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec from_halves(Shorts x) { return _mm256_cvtph_ps((__m128i)x); }
inline Shorts to_halves(Vec x) { return (Shorts)_mm256_cvtps_ph(x, kNearest); }
template <>
inline Ints integers<4>(const uint8_t* from) {
  return (Ints)_mm256_cvtepu8_epi32(unpacked(raw<uint32_t>(from)));
}
template <>
inline Ints integers<8>(const uint8_t* from) {
  return (Ints)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(raw<int64_t>(from)));
}
template <>
inline Ints integers<16>(const uint8_t* from) {
  return (Ints)_mm256_cvtepu16_epi32(raw<__m128i>(from));
}
#else
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
inline Vec fma(Vec a, Vec b, Vec c) {
  for (int64_t i = 0; i < kLanes; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
}
inline Vec from_halves(Shorts x) {
  Vec v;
  for (int64_t i = 0; i < kLanes; ++i) v[i] = half_value(x[i]);
  return v;
}
inline Shorts to_halves(Vec x) {
  Shorts v;
  for (int64_t i = 0; i < kLanes; ++i) v[i] = half_bits(x[i]);
  return v;
}
template <int bits>
inline Ints integers(const uint8_t* from) {
  Ints v;
  for (int64_t i = 0; i < kLanes; ++i) {
    if constexpr (bits == 4) v[i] = from[i / 2] >> (i % 2 ? 4 : 0) & 15;
    if constexpr (bits == 8) v[i] = from[i];
    if constexpr (bits == 16) v[i] = raw<uint16_t>(from + 2 * i);
  }
  return v;
}
#endif

inline Vec broadcast(float x) { return x - Vec{}; }

// Keeps the first elements and sets the others to 0.
inline Vec first_of(Vec v, int64_t count) {
  Ints lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  return (Vec)((Ints)v & (lane < static_cast<int32_t>(count)));
}

// `column` is even.
template <RowKind K>
inline Vec load(const uint8_t* row, int64_t column) {
  switch (K) {
    case RowKind::u8: return __builtin_convertvector(integers<8>(row + column), Vec);
    case RowKind::u4: return __builtin_convertvector(integers<4>(row + column / 2), Vec);
    case RowKind::f32: return raw<Vec>(row + 4 * column);
    case RowKind::f16: return from_halves(raw<Shorts>(row + 2 * column));
    default: return (Vec)(integers<16>(row + 2 * column) << 16);
  }
}

inline void add_wide(Wide& sums, Vec x) {
  sums += __builtin_convertvector(low(x), Wide);
  sums += __builtin_convertvector(high(x), Wide);
}

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

template <typename T, typename V>
inline void store(T* to, V v, int64_t count) {
  if (count == kLanes) {
    __builtin_memcpy(to, &v, sizeof v);
  } else {
    __builtin_memcpy(to, &v, sizeof(T) * static_cast<size_t>(count));
  }
}

inline Vec load_first(const float* from, int64_t count) {
  if (count == kLanes) return raw<Vec>(from);
  return load_some<RowKind::f32>(reinterpret_cast<const uint8_t*>(from), 0, count);
}

}  // namespace
}  // namespace holdfast
