// One-pass reductions over the rows of a strided matrix, dispatched to the widest SIMD this CPU
// has.
#pragma once

#include <cstdint>

namespace holdfast {

enum class Element : int { f64, f32, f16, bf16 };

// By Element. The names of these types in torch (native.ELEMENTS in Python).
constexpr const char* kElements[] = {"float64", "float32", "float16", "bfloat16"};
static_assert(sizeof kElements / sizeof *kElements == static_cast<int>(Element::bf16) + 1);

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
  const double* wide = nullptr;  // read in wide precision and of fp64 elements
  const float* narrow = nullptr;  // read in fast precision
  const uint16_t* high = nullptr;  // read of bf16 elements in fast precision, with
  const uint16_t* low = nullptr;  // the rest; null where `high` alone is exact
  const double* scale = nullptr;  // weights of the squares, in wide precision only
};

// One entry a row each, for what is not null: Σ x w; Σ x² scale; Σ x, with the squares only; and
// Σ x v, with the first and the squares only.
struct RowSums {
  double* weighted;
  double* square = nullptr;
  double* plain = nullptr;
  double* dot = nullptr;
  bool sample = false;  // in fast precision the squares of a sample will do: a lower bound
};

// Sums over the columns and over the rows at once, of rows that are contiguous and a multiple of
// kColumnStep long, in fast precision of 16- and 32-bit elements: Σ_j x_ij v_j for each row, and
// Σ_i x_ij u_i and Σ_i x_ij² s_i added to each column.
constexpr int64_t kColumnStep = 16;
struct CrossSums {
  const float* column_weights;  // v
  const float* row_weights;  // u
  double* rows;
  float* columns;
  const float* row_scales = nullptr;  // s
  float* squares = nullptr;  // where not null
};

struct Reductions {
  void (*rows)(
      Element, Precision, const MatrixView&, const Weights& w, const Weights& v, const RowSums&);
  void (*cross)(Element, const MatrixView&, const CrossSums&);
  const char* name;
};

extern const Reductions reductions_default;
#if defined(__x86_64__)
extern const Reductions reductions_avx2, reductions_avx512, reductions_avx512bf16;
#endif

// The widest implementation this processor runs.
const Reductions& reductions();

}  // namespace holdfast
