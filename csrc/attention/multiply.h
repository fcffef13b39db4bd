// Products of row-major tiles, by the microkernels that torch's own attention uses.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

namespace holdfast {

// Whether this processor and this torch have a kernel that sums in `accumulator` (fp32 or fp64).
bool multiplies(c10::ScalarType accumulator);

// C [m, n] = A [m, k] B [k, n], or added to C.
void multiply(
    int64_t m, int64_t n, int64_t k, const float* a, int64_t a_stride, const float* b,
    int64_t b_stride, float* c, int64_t c_stride, bool add);
void multiply(
    int64_t m, int64_t n, int64_t k, const double* a, int64_t a_stride, const double* b,
    int64_t b_stride, double* c, int64_t c_stride, bool add);

// The same in bf16, where the processor multiplies it: the rows of B in pairs, [k / 2, n, 2].
bool multiplies_bf16();
void multiply(
    int64_t m, int64_t n, int64_t k, const uint16_t* a, int64_t a_stride, const uint16_t* b,
    int64_t b_stride, float* c, int64_t c_stride, bool add);
void end_multiplying();  // on each thread that did, in bf16

}  // namespace holdfast
