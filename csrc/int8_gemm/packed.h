// An int8 matrix that is packed in FBGEMM's layout, and FBGEMM's products with it.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace holdfast {

// The first says whether FBGEMM is in this build and runs on this processor. The second says
// whether it adds pairs of 8-bit products in 16 bits here, which saturate unless |B| ≤ 64 or A ≤
// 127.
bool int8_available();
bool int8_saturates();

// Returns uninitialised memory that this thread keeps for its next call.
int32_t* int8_accumulators(int64_t count);

// The scales and zero points that FBGEMM requantises with, one for the whole tensor.
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
  at::Tensor buffer() const { return buffer_; }  // The packed bytes, int8, not a copy.
  at::Tensor unpack() const;  // int8 [K, N]
  at::Tensor column(int64_t j) const;  // int8 [K]
  int64_t address(int64_t k, int64_t j) const;  // The position of B[k, j] in the buffer.

  // Computes one thread's part of C = A B for `rows` contiguous rows of a.
  void multiply(
      const uint8_t* a, int64_t rows, int32_t* c, int64_t stride, int64_t thread,
      int64_t threads) const;
  // The same, with the result requantised block by block by FBGEMM.
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
