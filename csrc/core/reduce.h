// Reductions that read each row of a strided matrix once, for the widest instruction set that this
// processor has.
#pragma once

#include <cstdint>

namespace holdfast {

enum class Element : int { f64, f32, f16, bf16 };

// Torch's names of these types, in the order of Element (native.ELEMENTS in Python).
constexpr const char* kElements[] = {"float64", "float32", "float16", "bfloat16"};
static_assert(sizeof kElements / sizeof *kElements == static_cast<int>(Element::bf16) + 1);

// In fast precision, partial sums are fp32 (fp64 for fp64 elements) and are added up in fp64 after
// a few additions. In wide precision everything is fp64: that is for values whose squares leave the
// range of fp32, and for the final decision about a row.
enum class Precision : int { fast, wide };

struct MatrixView {
  const void* data;
  int64_t rows, cols;
  int64_t row_stride, col_stride;  // In elements. One must be 1, unless its extent is 1.
};

// The weights of the columns, in the number formats that the kernels read.
struct Weights {
  const double* wide = nullptr;  // These are read in wide precision, and for fp64 elements.
  const float* narrow = nullptr;  // These are read in fast precision.
  // For bf16 elements in fast precision a weight is high + low; `low` is null if `high` is exact.
  const uint16_t* high = nullptr;
  const uint16_t* low = nullptr;
  const double* scale = nullptr;  // These are the weights of the squares, in wide precision only.
};

// Columns of a transposed view that are summed in fp32 before they are gathered in fp64.
constexpr int64_t kColumnsGathered = 32;

// Where the sums of each row are written: Σ x w, Σ x² scale, Σ x and Σ x v. A sum whose pointer is
// null is not computed. Σ x can be had only with the squares, and Σ x v only with the first two.
struct RowSums {
  double* weighted;
  double* square = nullptr;
  double* plain = nullptr;
  double* dot = nullptr;
  bool sample = false;  // In fast precision, sum the squares of a sample: a lower bound.
  // Go on from the sums that are there, of a view with contiguous columns. They have the bits of
  // one call if each call but the last read a multiple of kColumnsGathered columns.
  bool onto = false;
};

// Sums along the rows and along the columns from one pass: Σ_j x_ij v_j of each row is written, and
// Σ_i x_ij u_i and Σ_i x_ij² s_i are added to each column. The elements have 16 or 32 bits, the
// precision is fast, and the rows are contiguous and a multiple of kColumnStep long.
constexpr int64_t kColumnStep = 16;
struct CrossSums {
  const float* column_weights;  // v
  const float* row_weights;  // u
  double* rows;
  float* columns;
  const float* row_scales = nullptr;  // s
  float* squares = nullptr;  // They are computed if this is not null.
};

struct Reductions {
  void (*rows)(
      Element, Precision, const MatrixView&, const Weights& w, const Weights& v, const RowSums&);
  void (*cross)(Element, const MatrixView&, const CrossSums&);
  // Passes over entries of an encoding: their part of its fingerprint, from `position` on; the
  // smallest of at least one; and their conversion for fast precision, to a float and, unless
  // `high` is null, to the sum of two bf16 (see Weights).
  uint64_t (*mixed)(const double* entries, int64_t count, int64_t position);
  double (*smallest)(const double* entries, int64_t count);
  void (*narrow)(const double*, int64_t count, float* narrow, uint16_t* high, uint16_t* low);
  const char* name;
};

extern const Reductions reductions_default, reductions_avx2, reductions_avx512;
extern const Reductions reductions_avx512bf16;

// The reductions for the widest instruction set that this processor has.
const Reductions& reductions();

}  // namespace holdfast
