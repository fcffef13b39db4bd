// The encoding of a matrix, in passes that may read it for something else as well.
#pragma once

#include "verify.h"

namespace holdfast {

class Encoder {
 public:
  explicit Encoder(const at::Tensor& b);  // 3-D

  // Rows from `begin` of one matrix; where `dot` is not null, also their products with `other`.
  void read(
      const MatrixView& rows, int64_t batch, int64_t begin, const Weights& other = {},
      double* dot = nullptr);

  const double* squares(int64_t batch) { return statistics(batch); }  // Σ x² of the rows read so far

  Encoding finish();  // once every row was read

 private:
  double* sums(int64_t batch);
  double* statistics(int64_t batch);
  double* plain(int64_t batch);

  Element element_;
  int64_t inner_, columns_;
  Encoding encoding_;
  at::Tensor plain_;
};

}  // namespace holdfast
