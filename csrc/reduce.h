// One-pass reductions over the rows of a strided matrix, dispatched to the widest SIMD this CPU has.
#pragma once

#include <cstdint>

namespace holdfast {

enum class Element : int { f64, f32, f16, bf16 };

// fast: partial sums in fp32 (fp64 for fp64 elements), gathered in fp64 after a few additions.
// wide: all of it in fp64, for values whose squares leave the range of fp32, and for verdicts.
enum class Precision : int { fast, wide };

struct MatrixView {
  const void* data;
  int64_t rows, cols;
  int64_t row_stride, col_stride;  // in elements; one of them must be 1 unless its extent is 1
};

// What the columns are weighted with, in the forms that the kernels read.
struct Weights {
  const double* wide = nullptr;      // read in wide precision and of fp64 elements
  const float* narrow = nullptr;     // read in fast precision
  const uint16_t* high = nullptr;    // read of bf16 elements in fast precision, with
  const uint16_t* low = nullptr;     // the rest; null where `high` alone is exact
  const double* scale = nullptr;     // weights of the squares, in wide precision only
};

// One entry a row each: Σ x w and, where not null, Σ x² scale (fast: at most that, and no less than
// the share of a sample) and Σ x (only together with the squares).
struct RowSums {
  double* weighted;
  double* square = nullptr;
  double* plain = nullptr;
};

using ReduceFn = void (*)(Element, Precision, const MatrixView&, const Weights&, const RowSums&);

void reduce_default(Element, Precision, const MatrixView&, const Weights&, const RowSums&);
#if defined(__x86_64__)
void reduce_avx2(Element, Precision, const MatrixView&, const Weights&, const RowSums&);
void reduce_avx512(Element, Precision, const MatrixView&, const Weights&, const RowSums&);
void reduce_avx512bf16(Element, Precision, const MatrixView&, const Weights&, const RowSums&);
#endif

// The widest implementation this processor runs, and its name for reports.
ReduceFn reduce_rows();
const char* simd_name();

}  // namespace holdfast
