// The encoding of a matrix, which may compute other sums in the same pass.
#pragma once

#include <utility>
#include <vector>

#include "core/checksum_weights.h"
#include "core/product.h"
#include "core/views.h"

namespace holdfast {

// Returns 32 bits that depend on every bit and its position (checksums/rows.py computes the same).
double fingerprint(const double* entries, int64_t count);
// Returns that of one matrix's row sums and of its statistics but the last, which is the
// fingerprint.
double fingerprint(const double* row_sum, const double* statistics, int64_t inner);

// Replaces the sums of squares of one matrix by z, and writes h behind them. The plain sums are
// null for 16-bit elements. Rows with equal sums count as repeated; with `rows`, which are those of
// the matrix, only if their elements are equal too.
void derive_statistics(
    Element element, double* square, const double* plain, int64_t inner, int64_t columns,
    const MatrixView* rows = nullptr);

Encoding encode(const at::Tensor& b);
// Returns the encodings of a matrix and of its transpose, as `encode` returns each bit for bit,
// from one pass over memory.
std::pair<Encoding, Encoding> encode_both(const at::Tensor& b);
bool intact(const Encoding& encoding);  // Returns whether it still has its fingerprint.

// Columns of a transposed view whose sums are added up before those of other columns, so that
// threads may share them: they are the rows of a task where the matrix is read along its memory.
constexpr int64_t kSegment = kRowsPerTask;

class Encoder {
 public:
  explicit Encoder(const MatrixBatch& b);

  // Reads rows of one matrix, which begin at row `begin`. Unless `dot` is null, it gets their
  // products with `other`.
  void read(
      const MatrixView& rows, int64_t batch, int64_t begin, const Weights& other = {},
      double* dot = nullptr);

  const double* squares(int64_t batch) {
    return statistics(batch);
  }  // Σ x² of the rows read so far, until the matrix is complete

  // Read the columns [begin, end) of every row of the first matrix, a transposed view: those of
  // each segment in order and a multiple of kColumnsGathered at once, segments in any order and by
  // any thread. Then add up the segments of the rows [begin, end).
  void prepare_segments();
  void read_columns(int64_t begin, int64_t end);
  void add_up(int64_t begin, int64_t end);

  void complete(int64_t batch);  // To be called once every row of a matrix was read.
  Encoding finish();  // Completes the remaining matrices.

 private:
  RowSums sums_from(int64_t batch, int64_t begin, double* dot = nullptr);
  RowSums segment(int64_t number, int64_t begin = 0);
  void read_again(const MatrixView& rows, const RowSums& out);
  double* sums(int64_t batch);
  double* statistics(int64_t batch);
  double* plain(int64_t batch);

  MatrixBatch b_;
  Element element_;
  int64_t inner_, columns_;
  Encoding encoding_;
  std::vector<double> plain_;
  at::Tensor segments_;  // Sums of the segments after the first, by `read_columns`.
  std::vector<char> completed_;
};

}  // namespace holdfast
