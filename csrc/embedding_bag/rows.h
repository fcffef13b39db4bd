// The rows of an embedding table, which carry their own checksums, and the kernels that pool them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace holdfast {

enum class RowKind : int { u8, u4, f32, f16, bf16 };

// The names in the order of RowKind (KINDS of embedding_bag/layout.py in Python).
constexpr const char* kRowKinds[] = {"uint8", "uint4", "float32", "float16", "bfloat16"};
static_assert(sizeof kRowKinds / sizeof *kRowKinds == static_cast<int>(RowKind::bf16) + 1);

constexpr bool quantised(RowKind kind) { return kind == RowKind::u8 || kind == RowKind::u4; }

// A row is its elements (u8: one byte a code, u4: two codes a byte, low half first), for the
// quantised kinds scale and bias (fp32; fp16 for u4), then the checksums:
//   quantised: 32 bits: signed sum of the codes (24) and a guard of scale, bias and sum (8);
//   floating:  fp64 signed sum of the elements; the upper 24 bits of their largest magnitude in
//              fp32, rounded up, and in its lower 8 a guard of both;
//   both:      CRC-32C of everything before it, begun with the row's number.
struct RowLayout {
  int64_t elements, parameters, checksums;  // In bytes.
  int64_t payload() const { return elements + parameters; }
  int64_t used() const { return payload() + checksums; }
  int64_t stride() const { return (used() + 15) & ~int64_t{15}; }  // Rows begin at multiples of 16.
};

inline RowLayout layout_of(RowKind kind, int64_t dim) {
  switch (kind) {
    case RowKind::u8: return {dim, 8, 8};
    case RowKind::u4: return {(dim + 1) / 2, 4, 8};
    case RowKind::f32: return {4 * dim, 0, 16};
    default: return {2 * dim, 0, 16};
  }
}

constexpr int64_t kMaxDim = 32768;  // The sum of the codes fits 24 bits: 255 kMaxDim < 2^23.

// Pseudo-random weights ±1 of the columns.
struct Signs {
  const float* values;
  double sum;  // It is never 0.
};
Signs signs_of(int64_t dim);

struct RowTable {
  uint8_t* data;
  int64_t rows, dim, stride;
  RowKind kind;
  RowLayout layout;
  Signs signs;
};

struct Pooling {
  const void* indices;
  bool wide;  // The indices are int64, not int32.
  int64_t count;  // The number of indices, which limits the prefetch.
  const float* weights;  // One for each index, or null.
  int64_t padding;  // A row that is left out, or -1.
  bool mean, prefetch, check;
};

// What the checksums of its rows predict of a bag.
struct Expected {
  double sum = 0;  // Σ_j r_j R_j of the output R.
  double variance = 0;  // The variance of the rounding errors of that sum.
  int64_t outside = -1;  // The position of an index that names no row.
  bool guarded = true;  // The guard of every row matched its scale, bias and sum.
};

constexpr int64_t kAhead = 16;  // So many rows are prefetched.
constexpr double kSigmas = 8;
constexpr double kRounding = 0x1p-24;

struct BagKernels {
  // Writes Σ w_i row_i of the indices [begin, end) to `out` [dim], and what is expected of it.
  void (*pool)(const RowTable&, const Pooling&, int64_t begin, int64_t end, float* out, Expected&);
  // Writes only what is expected, of an output that another kernel computed. The partial sums are
  // not known then.
  void (*expect)(
      const RowTable&, const Pooling&, int64_t begin, int64_t end, const float* out, Expected&);
  double (*signed_sum)(const float* out, int64_t dim, const float* signs);
  // Rounds to fp16 and returns whether every element is what it was rounded from.
  bool (*to_half)(const float* from, uint16_t* to, int64_t dim);
  const char* name;
};
extern const BagKernels bag_kernels_default, bag_kernels_avx2, bag_kernels_avx512;
const BagKernels& bag_kernels();  // for the instruction set that the reductions run on

inline bool agrees(const Expected& e, double signed_sum) {
  const double residual = signed_sum - e.sum;
  return e.guarded && residual * residual <= kSigmas * kSigmas * e.variance &&
      e.variance < __builtin_inf();
}

uint32_t crc32c(uint32_t crc, const void* bytes, int64_t count);
uint8_t guard_of(uint64_t parameters, uint32_t sum);  // `sum` has 24 bits.

void encode_row(const RowTable& table, int64_t row);
// Returns whether sum, guard and CRC are those of the row's bytes.
bool intact(const RowTable& table, int64_t row);
// Flips of bits within one byte of a row; none if `bits` is 0.
struct Flips {
  int64_t byte = 0;
  uint32_t bits = 0;
};
// Flips back the bits of the one damaged byte of a row, if a change of one byte explains its CRC,
// sum and guard. If several do, the one of the fewest bits is taken.
Flips correct_byte(const RowTable& table, int64_t row);

}  // namespace holdfast
