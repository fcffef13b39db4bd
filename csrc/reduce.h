// One-pass reductions over the rows of a strided matrix, dispatched to the widest SIMD this CPU has.
#pragma once

#include <cstdint>

namespace holdfast {

enum class Element : int { f64, f32, f16, bf16 };

// What one pass over the matrix yields for each row (all accumulated in fp64).
enum class Pass : int {
  encode,   // sum, low, high: the row checksum of B and what its threshold needs
  operand,  // sum, dot with weights, low, high: the predicted checksum and A's statistics
  output,   // sum, square: the actual checksum and the energy of C
};

struct RowResults {
  double* sum = nullptr;
  double* dot = nullptr;
  double* square = nullptr;
  double* low = nullptr;
  double* high = nullptr;
};

struct MatrixView {
  const void* data;
  int64_t rows, cols;
  int64_t row_stride, col_stride;  // in elements; one of them must be 1 unless its extent is 1
};

using ReduceFn = void (*)(Element, Pass, const MatrixView&, const double* weights, const RowResults&);

void reduce_default(Element, Pass, const MatrixView&, const double* weights, const RowResults&);
#if defined(__x86_64__)
void reduce_avx2(Element, Pass, const MatrixView&, const double* weights, const RowResults&);
void reduce_avx512(Element, Pass, const MatrixView&, const double* weights, const RowResults&);
#endif

// The widest implementation this processor runs, and its name for reports.
ReduceFn reduce_rows();
const char* simd_name();

}  // namespace holdfast
