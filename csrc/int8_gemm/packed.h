// An int8 matrix in FBGEMM's layout, and FBGEMM's products with it.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace holdfast {

// Whether this build has FBGEMM, and whether it adds up pairs of 8-bit products in 16 bits on this
// processor, where they saturate unless |B| ≤ 64 or A ≤ 127.
bool int8_available();
bool int8_saturates();

// Memory of this thread that is kept, and not cleared.
int32_t* int8_accumulators(int64_t count);

// What FBGEMM requantises by, of the whole tensor.
struct Int8Requantised {
  const int32_t* column_sums;
  const float* bias;
  float scale, a_times_b_scale;
  int32_t a_zero_point, zero_point;
};

class Int8Packed {
 public:
  explicit Int8Packed(const at::Tensor& b);  // int8 [K, N]
  ~Int8Packed();

  int64_t rows() const { return rows_; }
  int64_t columns() const { return columns_; }
  at::Tensor buffer() const { return buffer_; }  // int8, shared
  at::Tensor unpack() const;  // int8 [K, N]
  at::Tensor column(int64_t j) const;  // int8 [K]
  int64_t address(int64_t k, int64_t j) const;  // of B[k, j] in the buffer

  // C = A B of `rows` contiguous rows of a; this thread's part of it.
  void multiply(
      const uint8_t* a, int64_t rows, int32_t* c, int64_t stride, int64_t thread,
      int64_t threads) const;
  // The same, requantised block by block as FBGEMM does it.
  void multiply(
      const uint8_t* a, int64_t rows, uint8_t* out, const Int8Requantised& how, int32_t* c,
      int64_t thread, int64_t threads) const;

 private:
  struct Matrix;
  int64_t rows_, columns_;
  at::Tensor buffer_;
  std::unique_ptr<Matrix> matrix_;
};

}  // namespace holdfast
