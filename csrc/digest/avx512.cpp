#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512dq,prefer-vector-width=512")
// GCC 12 takes its own intrinsics' undefined operands for ours (bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include <cstring>

#include "digest/digest.h"

namespace holdfast::digest {
namespace {

__m512i at(const void* place) { return _mm512_loadu_si512(place); }

__m512i keyed(__m512i sums, __m512i words, __m512i key) {
  const __m512i x = _mm512_add_epi32(words, key);
  return _mm512_add_epi64(sums, _mm512_mul_epu32(x, _mm512_srli_epi64(x, 32)));
}

__m512i mixed(__m512i x) {
  x = _mm512_xor_si512(x, _mm512_srli_epi64(x, 33));
  x = _mm512_mullo_epi64(x, _mm512_set1_epi64(kMixOne));
  x = _mm512_xor_si512(x, _mm512_srli_epi64(x, 33));
  x = _mm512_mullo_epi64(x, _mm512_set1_epi64(kMixTwo));
  return _mm512_xor_si512(x, _mm512_srli_epi64(x, 33));
}

uint64_t added(__m512i lanes, __m512i places, uint64_t step) {
  const __m512i steps = _mm512_mullo_epi64(places, _mm512_set1_epi64(step));
  return _mm512_reduce_add_epi64(mixed(_mm512_add_epi64(lanes, steps)));
}

uint8_t* stream(uint8_t* target, const uint8_t* source, size_t nbytes) {
  asm volatile("" ::: "memory");  // or the registers of the sums would be stored
  const size_t head = -reinterpret_cast<uintptr_t>(target) & 63;
  if (nbytes < head + 64) {
    std::memcpy(target, source, nbytes);
    return target + nbytes;
  }
  std::memcpy(target, source, head);
  size_t done = head;
  for (; done + 64 <= nbytes; done += 64) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target + done), at(source + done));
  }
  std::memcpy(target + done, source + done, nbytes - done);
  return target + nbytes;
}

void add(const uint8_t* source, size_t stripes, uint64_t place, Sums& sums, uint8_t* target) {
  const uint32_t* key = keys();
  __m512i first = _mm512_setzero_si512(), second = first, one = at(key);
  const size_t piece = target ? kPiece : stripes;
  for (size_t left = stripes, taken = 0; left; left -= taken) {
    taken = left < piece ? left : piece;
    for (size_t stripe = 0; stripe < taken; ++stripe, source += kStripe) {
      key += 16;
      const __m512i words = at(source), other = at(key);
      first = keyed(first, words, one);
      second = keyed(second, words, other);
      one = other;
    }
    if (target) target = stream(target, source - taken * kStripe, taken * kStripe);
  }
  const __m512i lanes = _mm512_setr_epi64(1, 2, 3, 4, 5, 6, 7, 8);
  const __m512i places = _mm512_add_epi64(lanes, _mm512_set1_epi64(place * kLanes));
  sums.first += added(first, places, kFirstStep);
  sums.second += added(second, places, kSecondStep);
}

}  // namespace

const Kernels kernels_avx512{add, "avx512"};

}  // namespace holdfast::digest
#endif
