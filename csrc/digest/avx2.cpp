#if defined(__x86_64__)
#pragma GCC target("avx2")
#include <immintrin.h>

#include <cstring>

#include "digest/digest.h"

namespace holdfast::digest {
namespace {

__m256i at(const void* place) { return _mm256_loadu_si256(static_cast<const __m256i*>(place)); }

__m256i keyed(__m256i sums, __m256i words, __m256i key) {
  const __m256i x = _mm256_add_epi32(words, key);
  return _mm256_add_epi64(sums, _mm256_mul_epu32(x, _mm256_srli_epi64(x, 32)));
}

uint8_t* stream(uint8_t* target, const uint8_t* source, size_t nbytes) {
  asm volatile("" ::: "memory");  // or the registers of the sums would be stored
  const size_t head = -reinterpret_cast<uintptr_t>(target) & 31;
  if (nbytes < head + 32) {
    std::memcpy(target, source, nbytes);
    return target + nbytes;
  }
  std::memcpy(target, source, head);
  size_t done = head;
  for (; done + 32 <= nbytes; done += 32) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(target + done), at(source + done));
  }
  std::memcpy(target + done, source + done, nbytes - done);
  return target + nbytes;
}

void add(const uint8_t* source, size_t stripes, uint64_t place, Sums& sums, uint8_t* target) {
  const uint32_t* key = keys();
  __m256i first[2] = {}, second[2] = {}, one[2] = {at(key), at(key + 8)};
  const size_t piece = target ? kPiece : stripes;
  for (size_t left = stripes, taken = 0; left; left -= taken) {
    taken = left < piece ? left : piece;
    for (size_t stripe = 0; stripe < taken; ++stripe, source += kStripe) {
      key += 16;
      for (int half = 0; half < 2; ++half) {
        const __m256i words = at(source + 32 * half), other = at(key + 8 * half);
        first[half] = keyed(first[half], words, one[half]);
        second[half] = keyed(second[half], words, other);
        one[half] = other;
      }
    }
    if (target) target = stream(target, source - taken * kStripe, taken * kStripe);
  }
  alignas(32) uint64_t lanes[2][kLanes];
  std::memcpy(lanes[0], first, sizeof first);
  std::memcpy(lanes[1], second, sizeof second);
  add_lanes(lanes[0], lanes[1], place, sums);
}

}  // namespace

const Kernels kernels_avx2{add, "avx2"};

}  // namespace holdfast::digest
#endif
