// The passes of the verified int8 product, dispatched to the widest SIMD this CPU has: what the
// checks beside B predict of each row, and one pass over a row of accumulators that sums it exactly
// and turns it into the output.
#pragma once

#include <cstdint>

namespace holdfast {

enum class Int8Output : int { u8, f32, bf16 };

constexpr int64_t kInt8Padding = 64;  // elements that the kernels may read past the end

// y[j] = fp32(C[j] - shift[j] - b_zero_point[j] Σ_k A[k]) scale[j] + addend[j]; fp32 and bf16 are
// y rounded, uint8 is rint(y) + zero_point, saturated. Arrays are kInt8Padding longer than rows.
struct Int8Epilogue {
  const int32_t* shift;
  const int32_t* b_zero_point;  // null if all are 0
  const float* scale;
  const float* addend;
  int32_t zero_point;
  bool relu;
  Int8Output output;
};

struct Int8Rows {
  const int32_t* c;  // accumulators
  int64_t stride, rows, cols;
  const int64_t* a_sums;  // Σ_k A[i, k], where b has zero points
  void* out;
  int64_t out_stride;  // in elements
};

struct Int8Passes {
  // Σ_k A[i, k] Σ_d 256^d digits[d, k] for each row, exactly; at most three digits, zero past k.
  void (*predict)(
      const uint8_t* a, int64_t rows, int64_t k, const int8_t* digits, int64_t digit_stride,
      int64_t count, int64_t* predicted);
  // Writes the output rows and, where sums is not null, the exact Σ_j C[i, j].
  void (*finish)(const Int8Rows&, const Int8Epilogue&, int64_t* sums);
  const char* name;
};

extern const Int8Passes int8_passes_default;
#if defined(__x86_64__)
extern const Int8Passes int8_passes_avx2, int8_passes_avx512, int8_passes_avx512vnni;
#endif

const Int8Passes& int8_passes();

}  // namespace holdfast
