// The sums of digest/blocks.h, compiled once for each instruction set (core/simd/vectors.h).
#include <immintrin.h>

#include "core/simd/vectors.h"
#include "digest/blocks.h"

namespace holdfast::digest {
namespace {

typedef uint64_t Words __attribute__((vector_size(kBytes)));
typedef uint32_t HalfWords __attribute__((vector_size(kBytes)));
constexpr size_t kVectors = kStripe / kBytes;

#if HOLDFAST_BYTES == 64
// The zeroing form: GCC warns of the undefined register that the plain one names.
inline Words product_of_halves(Words x) {
  return (Words)_mm512_maskz_mul_epu32(0xff, (__m512i)x, (__m512i)(x >> 32));
}
inline void store_past_caches(uint8_t* to, Words x) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), (__m512i)x);
}
#else
inline Words product_of_halves(Words x) {
  return (Words)_mm256_mul_epu32((__m256i)x, (__m256i)(x >> 32));
}
inline void store_past_caches(uint8_t* to, Words x) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), (__m256i)x);
}
#endif

inline Words keyed(Words words, Words key) {
  return product_of_halves((Words)((HalfWords)words + (HalfWords)key));
}

// Copies bytes past the caches, but for those before and behind whole vectors of the target.
uint8_t* stream(uint8_t* target, const uint8_t* source, size_t nbytes) {
  asm volatile("" ::: "memory");  // Without it the registers of the sums would be stored.
  const size_t head = -reinterpret_cast<uintptr_t>(target) & (kBytes - 1);
  if (nbytes < head + kBytes) {
    __builtin_memcpy(target, source, nbytes);
    return target + nbytes;
  }
  __builtin_memcpy(target, source, head);
  size_t done = head;
  for (; done + kBytes <= nbytes; done += kBytes) {
    store_past_caches(target + done, raw<Words>(source + done));
  }
  __builtin_memcpy(target + done, source + done, nbytes - done);
  return target + nbytes;
}

void add(const uint8_t* source, size_t stripes, uint64_t place, Sums& sums, uint8_t* target) {
  constexpr size_t kKeysEach = kBytes / sizeof(uint32_t);
  const uint32_t* key = keys();
  Words first[kVectors] = {}, second[kVectors] = {}, one[kVectors];
  for (size_t v = 0; v < kVectors; ++v) one[v] = raw<Words>(key + v * kKeysEach);
  const size_t piece = target ? kPiece : stripes;
  for (size_t left = stripes, taken = 0; left; left -= taken) {
    taken = left < piece ? left : piece;
    for (size_t stripe = 0; stripe < taken; ++stripe, source += kStripe) {
      key += 16;
      for (size_t v = 0; v < kVectors; ++v) {
        const Words words = raw<Words>(source + v * kBytes),
                    other = raw<Words>(key + v * kKeysEach);
        first[v] += keyed(words, one[v]);
        second[v] += keyed(words, other);
        one[v] = other;
      }
    }
    if (target) target = stream(target, source - taken * kStripe, taken * kStripe);
  }
#if HOLDFAST_BYTES == 64
  Words at;
  for (size_t lane = 0; lane < kLanes; ++lane) at[lane] = place * kLanes + lane + 1;
  sums.first += total(mixed(first[0] + at * kFirstStep));
  sums.second += total(mixed(second[0] + at * kSecondStep));
#else  // There are no vector products of 64 bits, so the lanes are mixed one by one.
  alignas(kBytes) uint64_t lanes[2][kLanes];
  __builtin_memcpy(lanes[0], first, sizeof first);
  __builtin_memcpy(lanes[1], second, sizeof second);
  add_lanes(lanes[0], lanes[1], place, sums);
#endif
}

typedef double Doubles __attribute__((vector_size(kBytes)));
typedef float Floats __attribute__((vector_size(kBytes / 2)));
typedef uint32_t FewWords __attribute__((vector_size(kBytes / 2)));
typedef uint16_t Shorts __attribute__((vector_size(kBytes / 4)));
constexpr size_t kDoubles = kBytes / sizeof(double);
constexpr size_t kSideBySide = 4;

inline Doubles wide(const double* x) { return raw<Doubles>(x); }
inline Doubles wide(const float* x) { return __builtin_convertvector(raw<Floats>(x), Doubles); }
inline Doubles wide(const uint16_t* x) {
  const FewWords bits = __builtin_convertvector(raw<Shorts>(x), FewWords) << 16;
  return __builtin_convertvector((Floats)bits, Doubles);
}

template <typename T>
void sum_of(const void* block, size_t count, const double* signs, double* out, double* square) {
  const T* x = static_cast<const T*>(block);
  Doubles sums[kSideBySide] = {}, squares[kSideBySide] = {};
  size_t i = 0;
  for (; i + kSideBySide * kDoubles <= count; i += kSideBySide * kDoubles) {
    for (size_t v = 0; v < kSideBySide; ++v) {
      const Doubles value = wide(x + i + v * kDoubles);
      sums[v] += raw<Doubles>(signs + i + v * kDoubles) * value;
      squares[v] += value * value;
    }
  }
  *out = total((sums[0] + sums[1]) + (sums[2] + sums[3]));
  *square = total((squares[0] + squares[1]) + (squares[2] + squares[3]));
  add_elements(x, i, count, signs, *out, *square);
}

void sum(
    const void* block, size_t count, Element type, const double* signs, double* out,
    double* square) {
  by_type(type, [&](auto one) { sum_of<decltype(one)>(block, count, signs, out, square); });
}

}  // namespace

const Kernels HOLDFAST_OF_SET(kernels){add, sum, HOLDFAST_NAME};

}  // namespace holdfast::digest
