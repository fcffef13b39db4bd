#include "attention/multiply.h"

#include <ATen/native/CPUBlas.h>

#include <cstring>
#include <exception>

#include "core/reduce.h"

// The BLAS functions that torch exports; some builds export none.
extern "C" {
__attribute__((weak)) void sgemm_(
    const char*, const char*, const int*, const int*, const int*, const float*, const float*,
    const int*, const float*, const int*, const float*, float*, const int*);
__attribute__((weak)) void dgemm_(
    const char*, const char*, const int*, const int*, const int*, const double*, const double*,
    const int*, const double*, const int*, const double*, double*, const int*);
}

namespace holdfast {

namespace {

// BLAS is column-major: it computes C' = B' A' of the transposes, which is C in row-major order.
template <typename T, typename Blas>
void by_blas(
    Blas blas, int64_t m, int64_t n, int64_t k, const T* a, int64_t a_stride, const T* b,
    int64_t b_stride, T* c, int64_t c_stride, bool add) {
  const int rows = static_cast<int>(m), columns = static_cast<int>(n), inner = static_cast<int>(k);
  const int lda = static_cast<int>(a_stride), ldb = static_cast<int>(b_stride);
  const int ldc = static_cast<int>(c_stride);
  const T one = 1, beta = add ? 1 : 0;
  blas("N", "N", &columns, &rows, &inner, &one, b, &ldb, a, &lda, &beta, c, &ldc);
}

bool microkernel_runs() {
#if defined(CPUBLAS_BRGEMM_F32F32F32)
  try {
    const float a = 1, b = 1;
    float c = 0;
    at::native::cpublas::brgemm(1, 1, 1, 1, 1, 1, false, &a, &b, &c, false);
    return c == 1;
  } catch (const std::exception&) {
    return false;
  }
#else
  return false;
#endif
}

bool has_microkernel() {
  static const bool runs = microkernel_runs();
  return runs;
}

bool bf16_runs() {
#if defined(CPUBLAS_BRGEMM_BF16BF16F32)
  if (std::strcmp(reductions().name, "avx512bf16") != 0) return false;
  try {
    const uint16_t a[2] = {0x3f80, 0x4000}, b[2] = {0x4040, 0x3f80};  // 1 · 3 + 2 · 1
    float c = 0;
    multiply(1, 1, 2, a, 2, b, 1, &c, 1, false);
    end_multiplying();
    return c == 5;
  } catch (const std::exception&) {
    return false;
  }
#else
  return false;
#endif
}

}  // namespace

bool multiplies_bf16() {
  static const bool runs = bf16_runs();
  return runs;
}

void multiply(
    int64_t m, int64_t n, int64_t k, const uint16_t* a, int64_t a_stride, const uint16_t* b,
    int64_t b_stride, float* c, int64_t c_stride, bool add) {
  at::native::cpublas::brgemm(
      m, n, k, a_stride, b_stride, c_stride, add, reinterpret_cast<const at::BFloat16*>(a),
      reinterpret_cast<const at::BFloat16*>(b), c, true);
}

void end_multiplying() { at::native::cpublas::brgemm_release(true); }

bool multiplies(c10::ScalarType accumulator) {
  if (accumulator == c10::ScalarType::Double) return dgemm_ != nullptr;
  return has_microkernel() || sgemm_ != nullptr;
}

void multiply(
    int64_t m, int64_t n, int64_t k, const float* a, int64_t a_stride, const float* b,
    int64_t b_stride, float* c, int64_t c_stride, bool add) {
#if defined(CPUBLAS_BRGEMM_F32F32F32)
  if (has_microkernel()) {
    at::native::cpublas::brgemm(m, n, k, a_stride, b_stride, c_stride, add, a, b, c, false);
    return;
  }
#endif
  by_blas(sgemm_, m, n, k, a, a_stride, b, b_stride, c, c_stride, add);
}

void multiply(
    int64_t m, int64_t n, int64_t k, const double* a, int64_t a_stride, const double* b,
    int64_t b_stride, double* c, int64_t c_stride, bool add) {
  by_blas(dgemm_, m, n, k, a, a_stride, b, b_stride, c, c_stride, add);
}

}  // namespace holdfast
