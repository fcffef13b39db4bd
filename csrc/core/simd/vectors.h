// GCC's vectors, for kernels that are compiled once for each instruction set. The file that
// includes the kernels, which setup.py generates, sets HOLDFAST_BYTES to the width of a register,
// HOLDFAST_NAME to the name of the set, HOLDFAST_OF_SET(kernels) to that of the table of kernels,
// and a macro named after the set, such as HOLDFAST_AVX2. Nothing from the standard library is
// included: an inline function of it that was compiled for a wider instruction set could be linked
// into the rest of the program.
#pragma once

#include <cstdint>

namespace holdfast {
namespace {

constexpr int64_t kBytes = HOLDFAST_BYTES;

template <typename V>
inline V raw(const void* from) {
  V value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}

// The value of fp16 bits, by integers: as a float that is yet to be scaled a subnormal would be
// flushed to zero where the caller has denormals flushed.
inline float half_value(uint16_t bits) {
  const uint32_t magnitude = bits & 0x7fffu, sign = uint32_t{bits & 0x8000u} << 16;
  const uint32_t rebias = magnitude >= 0x7c00u ? 0x70000000u : 0x38000000u;
  const uint32_t subnormal =
      __builtin_bit_cast(uint32_t, static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  const uint32_t size = magnitude < 0x0400u ? subnormal : (magnitude << 13) + rebias;
  return __builtin_bit_cast(float, size | sign);
}

// Upto<n>::Type is Indices<0, …, n - 1>.
template <int64_t... index>
struct Indices {};
template <int64_t count, int64_t... index>
struct Upto : Upto<count - 1, count - 1, index...> {};
template <int64_t... index>
struct Upto<0, index...> {
  using Type = Indices<index...>;
};

// The halves of a vector. Taking its address instead would keep it out of the registers.
template <typename V>
constexpr int64_t kHalf = sizeof(V) / sizeof(V{}[0]) / 2;
template <int64_t first, typename V, int64_t... lane>
inline auto lanes_from(const V& v, Indices<lane...>) {
  return __builtin_shufflevector(v, v, (first + lane)...);
}
template <typename V>
inline auto low(const V& v) {
  return lanes_from<0>(v, typename Upto<kHalf<V>>::Type{});
}
template <typename V>
inline auto high(const V& v) {
  return lanes_from<kHalf<V>>(v, typename Upto<kHalf<V>>::Type{});
}

// The sum of the lanes: halves are added until one lane is left.
template <typename V>
inline auto total(const V& v) {
  if constexpr (kHalf<V> == 1) {
    return v[0] + v[1];
  } else {
    return total(low(v) + high(v));
  }
}

}  // namespace
}  // namespace holdfast
