// The passes of int8_gemm/passes.h, compiled once for each instruction set (core/simd/vectors.h).
// Products and sums round one by one, as those of the plain-torch reference do.
#include "core/simd/vectors.h"
#include "int8_gemm/passes.h"

#if HOLDFAST_BYTES > 16
#include <immintrin.h>
#endif

#pragma GCC optimize("fp-contract=off")

namespace holdfast {
namespace {

constexpr int64_t kLanes = kBytes / 4;
typedef int32_t Ints __attribute__((vector_size(kBytes)));
typedef uint32_t Words __attribute__((vector_size(kBytes)));
typedef float Floats __attribute__((vector_size(kBytes)));
typedef int64_t Longs __attribute__((vector_size(kBytes)));
typedef int16_t Halves __attribute__((vector_size(kBytes)));
typedef uint16_t Shorts __attribute__((vector_size(kBytes / 2)));
typedef uint8_t Octets __attribute__((vector_size(kBytes / 4)));

#if HOLDFAST_BYTES == 64
// These are the zeroing forms, as GCC warns of the undefined register that the plain ones name.
constexpr __mmask16 kAll = 0xffff;
inline Floats larger(Floats x, Floats y) {
  return (Floats)_mm512_maskz_max_ps(kAll, (__m512)x, (__m512)y);
}
inline Floats smaller(Floats x, Floats y) {
  return (Floats)_mm512_maskz_min_ps(kAll, (__m512)x, (__m512)y);
}
inline Ints larger(Ints x, Ints y) {
  return (Ints)_mm512_maskz_max_epi32(kAll, (__m512i)x, (__m512i)y);
}
inline Ints rounded(Floats x) { return (Ints)_mm512_maskz_cvtps_epi32(kAll, (__m512)x); }
inline Octets saturated(Ints x) { return (Octets)_mm512_maskz_cvtusepi32_epi8(kAll, (__m512i)x); }
#elif HOLDFAST_BYTES == 32
inline Floats larger(Floats x, Floats y) { return (Floats)_mm256_max_ps((__m256)x, (__m256)y); }
inline Floats smaller(Floats x, Floats y) { return (Floats)_mm256_min_ps((__m256)x, (__m256)y); }
inline Ints larger(Ints x, Ints y) { return (Ints)_mm256_max_epi32((__m256i)x, (__m256i)y); }
inline Ints rounded(Floats x) { return (Ints)_mm256_cvtps_epi32((__m256)x); }
inline Octets saturated(Ints x) {
  const __m128i low_half = _mm256_castsi256_si128((__m256i)x);
  const __m128i words = _mm_packs_epi32(low_half, _mm256_extracti128_si256((__m256i)x, 1));
  return (Octets)_mm_cvtsi128_si64(_mm_packus_epi16(words, words));
}
#else
template <typename V>
inline V larger(V x, V y) {
  return x > y ? x : y;
}
template <typename V>
inline V smaller(V x, V y) {
  return x < y ? x : y;
}
inline Octets saturated(Ints x) {
  return __builtin_convertvector(smaller(x, Ints{} + 255), Octets);
}
// Rounds ties to even for |x| < 2^22. Larger values saturate anyway.
inline Ints rounded(Floats x) {
  constexpr float kRound = 0x1.8p23f, kMost = 0x1p21f;
  x = smaller(larger(x, Floats{} - kMost), Floats{} + kMost);
  return __builtin_convertvector((x + kRound) - kRound, Ints);
}
#endif

// Adds the halves in 64 bits.
template <typename V>
inline Longs widened(const V& x) {
  return __builtin_convertvector(low(x), Longs) + __builtin_convertvector(high(x), Longs);
}

#if HOLDFAST_BYTES > 16
constexpr int64_t kStep = kBytes / 2;

// Reads 8-bit integers as 16-bit ones.
template <typename T>
inline Halves extended(const T* from) {
  typedef T Narrow __attribute__((vector_size(kStep)));
  return __builtin_convertvector(raw<Narrow>(from), Halves);
}

// Multiplies 16-bit integers and adds the products by pairs.
inline Ints pairs(Halves x, Halves y) {
#if HOLDFAST_BYTES == 64
  return (Ints)_mm512_madd_epi16((__m512i)x, (__m512i)y);
#else
  return (Ints)_mm256_madd_epi16((__m256i)x, (__m256i)y);
#endif
}

// Adds Σ_k A[r, k] digits[d, k] over kStep values of k. Loops are unrolled by force, as an array
// that a loop indexes would be kept in memory.
template <int64_t kRows, int64_t kCount>
inline __attribute__((always_inline)) void add_products(
    const uint8_t* a, int64_t a_stride, const int8_t* digits, int64_t digit_stride,
    Ints (&sums)[kRows][kCount]) {
  Halves of_b[kCount];
#pragma GCC unroll 3
  for (int64_t d = 0; d < kCount; ++d) of_b[d] = extended(digits + d * digit_stride);
#pragma GCC unroll 4
  for (int64_t r = 0; r < kRows; ++r) {
    const Halves of_a = extended(a + r * a_stride);
#pragma GCC unroll 3
    for (int64_t d = 0; d < kCount; ++d) sums[r][d] += pairs(of_a, of_b[d]);
  }
}
#endif

// Computes Σ_k A[r, k] digits[d, k], spread over lanes, for kRows rows that share the loads of
// digits.
template <int64_t kRows, int64_t kCount>
inline void multiply_digits(
    const uint8_t* a, int64_t k, const int8_t* digits, int64_t digit_stride,
    Ints (&sums)[kRows][kCount]) {
#if defined(HOLDFAST_AVX512VNNI)
  // Loops are unrolled by force, as an array that a loop indexes would be kept in memory.
  __m512i lanes[kRows][kCount] = {};
  const auto add = [&](int64_t i, __mmask64 mask) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int64_t r = 0; r < kRows; ++r) {
      const __m512i of_a = _mm512_maskz_loadu_epi8(mask, a + r * k + i);
#pragma GCC unroll 3
      for (int64_t d = 0; d < kCount; ++d) {
        const __m512i of_b = _mm512_loadu_si512(digits + d * digit_stride + i);
        lanes[r][d] = _mm512_dpbusd_epi32(lanes[r][d], of_a, of_b);
      }
    }
  };
  int64_t i = 0;
  for (; k - i >= 64; i += 64) add(i, ~__mmask64{0});
  if (i < k) add(i, ~__mmask64{0} >> (64 - (k - i)));
#pragma GCC unroll 4
  for (int64_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 3
    for (int64_t d = 0; d < kCount; ++d) sums[r][d] = (Ints)lanes[r][d];
  }
#elif HOLDFAST_BYTES > 16
  int64_t i = 0;
  for (; k - i >= kStep; i += kStep) add_products(a + i, k, digits + i, digit_stride, sums);
  if (i < k) {
    uint8_t last[kRows * kStep] = {};
    for (int64_t r = 0; r < kRows; ++r) __builtin_memcpy(last + r * kStep, a + r * k + i, k - i);
    add_products(last, kStep, digits + i, digit_stride, sums);
  }
#else
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t d = 0; d < kCount; ++d) {
      const uint8_t* of_a = a + r * k;
      const int8_t* of_b = digits + d * digit_stride;
      int32_t sum = 0;
      for (int64_t i = 0; i < k; ++i) sum += int16_t{of_a[i]} * int16_t{of_b[i]};
      sums[r][d][0] = sum;
    }
  }
#endif
}

template <int64_t kRows, int64_t kCount>
void predict_rows(
    const uint8_t* a, int64_t k, const int8_t* digits, int64_t digit_stride, int64_t* predicted) {
  Ints sums[kRows][kCount] = {};
  multiply_digits<kRows, kCount>(a, k, digits, digit_stride, sums);
  for (int64_t r = 0; r < kRows; ++r) {
    Longs sum = widened(sums[r][kCount - 1]);
    for (int64_t d = kCount - 1; d-- > 0;) sum = (sum << 8) + widened(sums[r][d]);
    predicted[r] = total(sum);
  }
}

template <int64_t kCount>
void predict(
    const uint8_t* a, int64_t rows, int64_t k, const int8_t* digits, int64_t digit_stride,
    int64_t* predicted) {
  constexpr int64_t kTogether = 4;
  int64_t r = 0;
  for (; rows - r >= kTogether; r += kTogether) {
    predict_rows<kTogether, kCount>(a + r * k, k, digits, digit_stride, predicted + r);
  }
  for (; r < rows; ++r) {
    predict_rows<1, kCount>(a + r * k, k, digits, digit_stride, predicted + r);
  }
}

void predict_digits(
    const uint8_t* a, int64_t rows, int64_t k, const int8_t* digits, int64_t digit_stride,
    int64_t count, int64_t* predicted) {
  switch (count) {
    case 1: return predict<1>(a, rows, k, digits, digit_stride, predicted);
    case 2: return predict<2>(a, rows, k, digits, digit_stride, predicted);
    default: return predict<3>(a, rows, k, digits, digit_stride, predicted);
  }
}

// An exact sum of up to 65,536 32-bit integers in 32-bit lanes. It keeps their sum modulo 2^32 and
// the sum of their upper halves, from which that of the lower halves follows.
struct ExactSum {
  Words all{};
  Ints high{};
  void add(const Ints& c) {
    all += (Words)c;
    high += c >> 16;
  }
  int64_t value() const {
    const Words low = all - ((Words)high << 16);
    return total((widened(high) << 16) + widened(low));
  }
};

template <Int8Output kOutput>
struct Written;
template <>
struct Written<Int8Output::u8> {
  using Element = uint8_t;
  using Vector = Octets;
};
template <>
struct Written<Int8Output::f32> {
  using Element = float;
  using Vector = Floats;
};
template <>
struct Written<Int8Output::bf16> {
  using Element = uint16_t;
  using Vector = Shorts;
};

template <Int8Output kOutput, bool kZeroB>
inline typename Written<kOutput>::Vector output_of(
    const Ints& c, int64_t j, uint32_t a_sum, const Int8Epilogue& e) {
  Words t = (Words)c - raw<Words>(e.shift + j);
  if constexpr (kZeroB) t -= raw<Words>(e.b_zero_point + j) * a_sum;
  Floats y = __builtin_convertvector((Ints)t, Floats) * raw<Floats>(e.scale + j);
  y = y + raw<Floats>(e.addend + j);
  if constexpr (kOutput == Int8Output::u8) {
    const Ints q = rounded(smaller(y, Floats{} + 0x1p30f)) + e.zero_point;
    return saturated(larger(q, Ints{} + (e.relu ? e.zero_point : 0)));
  } else {
    y = larger(y, Floats{} + (e.relu ? 0.0f : -__builtin_inff()));
    if constexpr (kOutput == Int8Output::f32) {
      return y;
    } else {
      const Words bits = (Words)y;
      return __builtin_convertvector((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16, Shorts);
    }
  }
}

template <Int8Output kOutput, bool kZeroB, bool kSum>
void finish_rows(const Int8Rows& of_rows, const Int8Epilogue& epilogue, int64_t* sums) {
  using Element = typename Written<kOutput>::Element;
  // A copy, as the compiler must assume that the output overwrites the original.
  const Int8Rows rows = of_rows;
  const Int8Epilogue e = epilogue;
  for (int64_t i = 0; i < rows.rows; ++i) {
    const int32_t* c = rows.c + i * rows.stride;
    Element* out = static_cast<Element*>(rows.out) + i * rows.out_stride;
    const uint32_t a_sum = kZeroB ? static_cast<uint32_t>(rows.a_sums[i]) : 0;
    ExactSum sum;
    int64_t j = 0;
    for (; rows.cols - j >= kLanes; j += kLanes) {
      const Ints of_c = raw<Ints>(c + j);
      if constexpr (kSum) sum.add(of_c);
      const auto done = output_of<kOutput, kZeroB>(of_c, j, a_sum, e);
      __builtin_memcpy(out + j, &done, sizeof done);
    }
    if (const int64_t left = rows.cols - j; left > 0) {
      Ints of_c{};
      __builtin_memcpy(&of_c, c + j, left * sizeof(int32_t));
      if constexpr (kSum) sum.add(of_c);
      const auto done = output_of<kOutput, kZeroB>(of_c, j, a_sum, e);
      __builtin_memcpy(out + j, &done, left * sizeof(Element));
    }
    if constexpr (kSum) sums[i] = sum.value();
  }
}

template <Int8Output kOutput>
void finish_rows(const Int8Rows& rows, const Int8Epilogue& e, int64_t* sums) {
  if (e.b_zero_point != nullptr) {
    return sums != nullptr ? finish_rows<kOutput, true, true>(rows, e, sums)
                           : finish_rows<kOutput, true, false>(rows, e, sums);
  }
  return sums != nullptr ? finish_rows<kOutput, false, true>(rows, e, sums)
                         : finish_rows<kOutput, false, false>(rows, e, sums);
}

void finish(const Int8Rows& rows, const Int8Epilogue& e, int64_t* sums) {
  switch (e.output) {
    case Int8Output::u8: return finish_rows<Int8Output::u8>(rows, e, sums);
    case Int8Output::f32: return finish_rows<Int8Output::f32>(rows, e, sums);
    case Int8Output::bf16: return finish_rows<Int8Output::bf16>(rows, e, sums);
  }
}

}  // namespace

const Int8Passes HOLDFAST_OF_SET(int8_passes){&predict_digits, &finish, HOLDFAST_NAME};

}  // namespace holdfast
