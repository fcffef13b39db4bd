// The encoding of a matrix, in passes that may read it for something else as well.
#pragma once

#include <vector>

#include "core/checksum_weights.h"
#include "core/product.h"

namespace holdfast {

// 32 bits that mix every bit with its position (checksums/rows.py computes the same).
double fingerprint(const double* entries, int64_t count);
// Of one matrix's row sums, and of its statistics but the last, which is this fingerprint.
double fingerprint(const double* row_sum, const double* statistics, int64_t inner);

// z of one matrix in place of its squares, and h behind them; plain sums: null for 16-bit elements.
void derive_statistics(
    Element element, double* square, const double* plain, int64_t inner, int64_t columns);

Encoding encode(const at::Tensor& b);
bool intact(const Encoding& encoding);  // whether it still has its fingerprint

class Encoder {
 public:
  explicit Encoder(const at::Tensor& b);  // 3-D

  // Rows from `begin` of one matrix; where `dot` is not null, also their products with `other`.
  void read(
      const MatrixView& rows, int64_t batch, int64_t begin, const Weights& other = {},
      double* dot = nullptr);

  const double* squares(int64_t batch) {
    return statistics(batch);
  }  // Σ x² of the rows read so far, until the matrix is complete

  void complete(int64_t batch);  // once every row of one matrix was read
  Encoding finish();  // completes those that are not

 private:
  double* sums(int64_t batch);
  double* statistics(int64_t batch);
  double* plain(int64_t batch);

  Element element_;
  int64_t inner_, columns_;
  Encoding encoding_;
  at::Tensor plain_;
  std::vector<char> completed_;
};

}  // namespace holdfast
