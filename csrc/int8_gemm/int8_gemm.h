// The product of uint8 activations and packed int8 weights, of which every int32 row is verified
// exactly.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "int8_gemm/packed.h"
#include "int8_gemm/passes.h"

namespace holdfast {

// The part of a product that does not change between calls. A tensor with an entry for each column
// has kInt8Padding more.
struct Int8Settings {
  int64_t columns;  // The columns of the product, without a check column.
  bool modular;  // The check is a packed column, Σ_j B[k, j] mod 127, instead of the digits.
  at::Tensor digits;  // The digits of Σ_j B[k, j], int8 [digits, K + padding].
  at::Tensor ones;  // Ones, int8 [1, K + padding], which are read if b has zero points.
  at::Tensor column_sums;  // Σ_k B[k, j], int32.
  at::Tensor b_scale;  // fp32
  std::optional<at::Tensor> b_zero_point;  // int32, or none if all are 0.
  at::Tensor bias;  // fp32
  bool relu;
};

// How a call scales its result. It is used again as long as the scales of a do not change.
struct Int8Scales {
  at::Tensor shift, scale, addend;  // As in Int8Epilogue.
  double a_scale;
  int64_t a_zero_point;
  double out_scale;  // 0 if the output is not quantised.
  int64_t out_zero_point;
};

// The rows whose check failed: their indices, and their accumulators with the check column.
using Int8Suspects = std::optional<std::tuple<at::Tensor, at::Tensor>>;

class Int8Gemm {
 public:
  Int8Gemm(const at::Tensor& b, Int8Settings settings);  // int8 [K, columns + check columns]

  Int8Scales scales(
      double a_scale, int64_t a_zero_point, double out_scale, int64_t out_zero_point) const;

  // Writes out [M, columns], which is uint8, fp32 or bf16. Without `verify` no row is checked.
  Int8Suspects multiply(
      const at::Tensor& a, const at::Tensor& out, const Int8Scales& scales, bool verify) const;

  // The same in two steps, so that a fault injector can reach the accumulators in between.
  at::Tensor accumulate(const at::Tensor& a) const;  // int32 [M, columns + check columns]
  Int8Suspects finish(
      const at::Tensor& c, const at::Tensor& a, const at::Tensor& out, const Int8Scales& scales,
      bool verify) const;

  // Multiplies by FBGEMM's own pipeline, which requantises block by block, to uint8 and unchecked.
  void multiply_unprotected(
      const at::Tensor& a, const at::Tensor& out, const Int8Scales& scales) const;

  const Int8Packed& packed() const { return b_; }

 private:
  struct Suspects;
  void check(const at::Tensor& a, const at::Tensor& out) const;
  Int8Epilogue epilogue(const at::Tensor& out, const Int8Scales& scales) const;
  void finish_rows(
      const int32_t* c, const uint8_t* a, int64_t begin, int64_t end, const Int8Epilogue& epilogue,
      void* out, Suspects* suspects) const;
  bool holds(const int32_t* row, int64_t sum, int64_t predicted) const;
  // Returns whether FBGEMM's 16-bit sums could saturate on these rows of a.
  bool saturates(const uint8_t* a, int64_t rows) const;

  Int8Settings settings_;
  Int8Packed b_;
  int64_t inner_, width_;  // K, and the columns with the check column.
  int64_t stride_;  // From one row of accumulators to the next.
  bool wide_;  // B holds values with which FBGEMM's 16-bit sums may saturate on this processor.
};

}  // namespace holdfast
