// uint8 activations times packed int8 weights, every row of the int32 product verified exactly.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "int8_gemm/packed.h"
#include "int8_gemm/passes.h"

namespace holdfast {

// What does not change between calls. Tensors over columns are kInt8Padding longer.
struct Int8Settings {
  int64_t columns;  // of the product, without check columns
  bool modular;  // one packed check column, Σ_j B[k, j] mod 127; else the digits
  at::Tensor digits;  // int8 [digits, K + padding] of Σ_j B[k, j], beside the packed matrix
  at::Tensor ones;  // int8 [1, K + padding], read where b has zero points
  at::Tensor column_sums;  // int32, Σ_k B[k, j]
  at::Tensor b_scale;  // fp32
  std::optional<at::Tensor> b_zero_point;  // int32; none if all are 0
  at::Tensor bias;  // fp32
  bool relu;
};

// How a call scales: prepared once where the scales of a do not change.
struct Int8Scales {
  at::Tensor shift, scale, addend;  // see Int8Epilogue
  double a_scale;
  int64_t a_zero_point;
  double out_scale;  // 0: not quantised
  int64_t out_zero_point;
};

// Rows whose check failed: their indices, and their accumulators with the check columns.
using Int8Suspects = std::optional<std::tuple<at::Tensor, at::Tensor>>;

class Int8Gemm {
 public:
  Int8Gemm(const at::Tensor& b, Int8Settings settings);  // int8 [K, columns + check columns]

  Int8Scales scales(
      double a_scale, int64_t a_zero_point, double out_scale, int64_t out_zero_point) const;

  // out [M, columns]: uint8, fp32 or bf16. Without `verify` nothing is summed.
  Int8Suspects multiply(
      const at::Tensor& a, const at::Tensor& out, const Int8Scales& scales, bool verify) const;

  // The same in two steps, so that the accumulators can be reached in between.
  at::Tensor accumulate(const at::Tensor& a) const;  // int32 [M, columns + check columns]
  Int8Suspects finish(
      const at::Tensor& c, const at::Tensor& a, const at::Tensor& out, const Int8Scales& scales,
      bool verify) const;

  // FBGEMM's own pipeline, which requantises block by block; uint8 out, no check.
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
  bool saturates(const uint8_t* a, int64_t rows) const;  // FBGEMM would, on these rows

  Int8Settings settings_;
  Int8Packed b_;
  int64_t inner_, width_, stride_;  // K; columns with check columns; of accumulators
  bool wide_;  // B holds values of which FBGEMM's sums of pairs may saturate on this processor
};

}  // namespace holdfast
