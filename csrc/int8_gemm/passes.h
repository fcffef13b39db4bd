// The passes of the verified int8 product, for each instruction set. One predicts the sum of each
// row from the checksums of B. The other reads a row of accumulators once, sums it exactly and
// turns it into the output.
#pragma once

#include <cstdint>

namespace holdfast {

enum class Int8Output : int { u8, f32, bf16 };

constexpr int64_t kInt8Padding = 64;  // The kernels may read so many elements past the end.

// How accumulators become the output:
// y[j] = fp32(C[j] - shift[j] - b_zero_point[j] Σ_k A[k]) scale[j] + addend[j]. An output of fp32
// or bf16 is y rounded; one of uint8 is rint(y) + zero_point, saturated. Each array has an entry
// for each column and kInt8Padding more.
struct Int8Epilogue {
  const int32_t* shift;
  const int32_t* b_zero_point;  // Null if all are 0.
  const float* scale;
  const float* addend;
  int32_t zero_point;
  bool relu;
  Int8Output output;
};

struct Int8Rows {
  const int32_t* c;  // The accumulators.
  int64_t stride, rows, cols;
  const int64_t* a_sums;  // Σ_k A[i, k], which is read if b has zero points.
  void* out;
  int64_t out_stride;  // In elements.
};

struct Int8Passes {
  // Computes Σ_k A[i, k] Σ_d 256^d digits[d, k] of each row exactly. There are at most three
  // digits, and they are zero past k.
  void (*predict)(
      const uint8_t* a, int64_t rows, int64_t k, const int8_t* digits, int64_t digit_stride,
      int64_t count, int64_t* predicted);
  // Writes the output rows and, unless `sums` is null, the exact Σ_j C[i, j] of each.
  void (*finish)(const Int8Rows&, const Int8Epilogue&, int64_t* sums);
  const char* name;
};

extern const Int8Passes int8_passes_default, int8_passes_avx2, int8_passes_avx512;
extern const Int8Passes int8_passes_avx512vnni;

// The passes for the instruction set that the reductions run on.
const Int8Passes& int8_passes();

}  // namespace holdfast
