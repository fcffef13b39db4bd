// The body of reduce.h, compiled once per instruction set: the including file sets the target and
// HOLDFAST_REDUCE. Nothing from the standard library is included here, so that no inline function
// built for a wider instruction set can leak into the rest of the program.
#include "reduce.h"

namespace holdfast {
namespace {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

inline float float_of_bits(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

inline double load(double x) { return x; }
inline float load(float x) { return x; }
inline float load(BFloat16 x) { return float_of_bits(static_cast<uint32_t>(x.bits) << 16); }
inline float load(Half x) {
  // Exponent and mantissa moved into fp32 position, then rescaled: exact for subnormals too.
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fffu) << 13;
  const float scaled = float_of_bits(magnitude) * 0x1p112f;
  uint32_t bits;
  __builtin_memcpy(&bits, &scaled, sizeof bits);
  bits |= (x.bits & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
  return float_of_bits(bits | (static_cast<uint32_t>(x.bits & 0x8000u) << 16));
}

constexpr double kInfinity = __builtin_inf();

// Rows contiguous: each row is reduced on its own.
template <typename T, Pass P>
void rows_contiguous(const MatrixView& m, const double* weights, const RowResults& out) {
  using Wide = decltype(load(T{}));
  for (int64_t i = 0; i < m.rows; ++i) {
    const T* row = static_cast<const T*>(m.data) + i * m.row_stride;
    double sum = 0, dot = 0, square = 0;
    Wide low = static_cast<Wide>(kInfinity), high = static_cast<Wide>(-kInfinity);
#pragma omp simd reduction(+ : sum, dot, square) reduction(min : low) reduction(max : high)
    for (int64_t j = 0; j < m.cols; ++j) {
      const Wide value = load(row[j]);
      const double wide = value;
      sum += wide;
      if constexpr (P == Pass::operand) dot += wide * weights[j];
      if constexpr (P == Pass::output) square += wide * wide;
      if constexpr (P != Pass::output) {
        low = value < low ? value : low;
        high = value > high ? value : high;
      }
    }
    out.sum[i] = sum;
    if constexpr (P == Pass::operand) out.dot[i] = dot;
    if constexpr (P == Pass::output) out.square[i] = square;
    if constexpr (P != Pass::output) {
      out.low[i] = low;
      out.high[i] = high;
    }
  }
}

// Columns contiguous (a transposed view): a strip of rows is reduced together, so that memory is
// still read along its contiguous direction.
template <typename T, Pass P>
void columns_contiguous(const MatrixView& m, const double* weights, const RowResults& out) {
  using Wide = decltype(load(T{}));
  constexpr int64_t kStrip = 64;
  for (int64_t begin = 0; begin < m.rows; begin += kStrip) {
    const int64_t width = m.rows - begin < kStrip ? m.rows - begin : kStrip;
    double sum[kStrip], dot[kStrip], square[kStrip];
    Wide low[kStrip], high[kStrip];
    for (int64_t i = 0; i < kStrip; ++i) {
      sum[i] = dot[i] = square[i] = 0;
      low[i] = static_cast<Wide>(kInfinity);
      high[i] = static_cast<Wide>(-kInfinity);
    }
    const auto accumulate = [&](const T* column, double weight, int64_t count) {
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) {
        const Wide value = load(column[i]);
        const double wide = value;
        sum[i] += wide;
        if constexpr (P == Pass::operand) dot[i] += wide * weight;
        if constexpr (P == Pass::output) square[i] += wide * wide;
        if constexpr (P != Pass::output) {
          low[i] = value < low[i] ? value : low[i];
          high[i] = value > high[i] ? value : high[i];
        }
      }
    };
    for (int64_t k = 0; k < m.cols; ++k) {
      const T* column = static_cast<const T*>(m.data) + k * m.col_stride + begin;
      const double weight = P == Pass::operand ? weights[k] : 0;
      if (width == kStrip) {
        accumulate(column, weight, kStrip);
      } else {
        accumulate(column, weight, width);
      }
    }
    for (int64_t i = 0; i < width; ++i) {
      out.sum[begin + i] = sum[i];
      if constexpr (P == Pass::operand) out.dot[begin + i] = dot[i];
      if constexpr (P == Pass::output) out.square[begin + i] = square[i];
      if constexpr (P != Pass::output) {
        out.low[begin + i] = low[i];
        out.high[begin + i] = high[i];
      }
    }
  }
}

template <typename T, Pass P>
void reduce(const MatrixView& m, const double* weights, const RowResults& out) {
  if (m.col_stride == 1 || m.cols == 1) {
    rows_contiguous<T, P>(m, weights, out);
  } else {
    columns_contiguous<T, P>(m, weights, out);
  }
}

template <typename T>
void reduce(Pass pass, const MatrixView& m, const double* weights, const RowResults& out) {
  switch (pass) {
    case Pass::encode: return reduce<T, Pass::encode>(m, weights, out);
    case Pass::operand: return reduce<T, Pass::operand>(m, weights, out);
    case Pass::output: return reduce<T, Pass::output>(m, weights, out);
  }
}

}  // namespace

void HOLDFAST_REDUCE(
    Element element, Pass pass, const MatrixView& m, const double* weights, const RowResults& out) {
  switch (element) {
    case Element::f64: return reduce<double>(pass, m, weights, out);
    case Element::f32: return reduce<float>(pass, m, weights, out);
    case Element::f16: return reduce<Half>(pass, m, weights, out);
    case Element::bf16: return reduce<BFloat16>(pass, m, weights, out);
  }
}

}  // namespace holdfast
