// Products of row-major tiles, by the kernels that torch's own attention uses.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

namespace holdfast {

// Returns whether this processor and this torch have a kernel that sums in `accumulator`, fp32 or
// fp64.
bool multiplies(c10::ScalarType accumulator);

// Computes C [m, n] = A [m, k] B [k, n], or adds the product to C.
void multiply(
    int64_t m, int64_t n, int64_t k, const float* a, int64_t a_stride, const float* b,
    int64_t b_stride, float* c, int64_t c_stride, bool add);
void multiply(
    int64_t m, int64_t n, int64_t k, const double* a, int64_t a_stride, const double* b,
    int64_t b_stride, double* c, int64_t c_stride, bool add);

// The same for bf16, on processors that multiply it. The rows of B come in pairs, [k / 2, n, 2].
bool multiplies_bf16();
void multiply(
    int64_t m, int64_t n, int64_t k, const uint16_t* a, int64_t a_stride, const uint16_t* b,
    int64_t b_stride, float* c, int64_t c_stride, bool add);
void end_multiplying();  // Every thread that multiplied bf16 calls it at its end.

}  // namespace holdfast
