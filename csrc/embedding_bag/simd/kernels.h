// The kernels of embedding_bag/rows.h, compiled once for each instruction set
// (core/simd/vectors.h). Each rounds alike: an element is fma(scale, code, R + bias), row by row,
// as FBGEMM computes it.
#include "embedding_bag/simd/lanes.h"

namespace holdfast {
namespace {

constexpr int64_t kSampled = 16;  // rows between two looks at the energy of the partial sums

struct Parameters {
  float scale, bias;
};

template <RowKind K>
inline Parameters parameters(const uint8_t* row, const RowLayout& layout) {
  if constexpr (K == RowKind::u8) {
    return {raw<float>(row + layout.elements), raw<float>(row + layout.elements + 4)};
  } else if constexpr (K == RowKind::u4) {
    return {
        half_value(raw<uint16_t>(row + layout.elements)),
        half_value(raw<uint16_t>(row + layout.elements + 2))};
  } else {
    return {1, 0};
  }
}

inline int64_t index_at(const Pooling& p, int64_t i) {
  return p.wide ? static_cast<const int64_t*>(p.indices)[i]
                : int64_t{static_cast<const int32_t*>(p.indices)[i]};
}

typedef double Pair __attribute__((vector_size(16)));
typedef float FloatPair __attribute__((vector_size(8)));

// A bag's checksums as they are gathered, in pairs: what comes of the scales, and of the biases.
struct Tally {
  Pair sums{}, squares{}, weighting{};
  uint32_t mismatch = 0;
  int64_t pooled = 0;

  template <RowKind K, bool weighted>
  void add(const uint8_t* row, const RowTable& t, float weight) {
    const uint8_t* after = row + t.layout.payload();
    Pair values, factors;
    if constexpr (quantised(K)) {
      const uint32_t word = raw<uint32_t>(after);
      const uint64_t bytes = K == RowKind::u8 ? raw<uint64_t>(row + t.layout.elements)
                                              : raw<uint32_t>(row + t.layout.elements);
      mismatch |= guard(bytes, word & 0xffffffu) ^ (word >> 24);
      if constexpr (K == RowKind::u8) {
        values = __builtin_convertvector(raw<FloatPair>(row + t.layout.elements), Pair);
      } else {
        const Parameters p = parameters<K>(row, t.layout);
        values = Pair{p.scale, p.bias};
      }
      factors = Pair{static_cast<double>(static_cast<int32_t>(word << 8) >> 8), t.signs.sum};
    } else {
      const uint32_t word = raw<uint32_t>(after + 8);
      mismatch |= guard(raw<uint64_t>(after), word >> 8) ^ word;
      values = Pair{__builtin_bit_cast(float, word & ~255u), 0};
      sums += Pair{raw<double>(after) * weight, 0};
      factors = Pair{};
    }
    if constexpr (weighted) values *= static_cast<double>(weight);  // exact
    const Pair products = values * factors;
    sums += products;
    squares += values * values;
    if constexpr (weighted) weighting += products * products;
    ++pooled;
  }

  double sum() const { return sums[0] + sums[1]; }
  double rounded() const { return weighting[0] + weighting[1]; }
  // Σ_i of a square that none of row i's elements exceeds, but for its bias added to it.
  template <RowKind K>
  double peaks() const {
    constexpr double top = K == RowKind::u8 ? 255 : K == RowKind::u4 ? 15 : 1;
    return top * top * squares[0] + squares[1];
  }
};

inline void prefetch(const RowTable& t, const Pooling& p, int64_t i) {
  if (i >= p.count) return;
  const int64_t index = index_at(p, i);
  if (static_cast<uint64_t>(index) >= static_cast<uint64_t>(t.rows)) return;
  const uint8_t* row = t.data + index * t.stride;
  for (int64_t at = 0; at < t.layout.used(); at += 64) __builtin_prefetch(row + at);
  __builtin_prefetch(row + t.layout.used() - 1);
}

struct Panel {
  int64_t column;  // the first
  int64_t last;  // elements in the last vector
  bool first;  // also checks the indices and prefetches
  bool check;
};

// In a pass of its own, while the rows are in the cache: within the loop that waits for them it
// would halve the number of rows that the processor waits for at once.
template <RowKind K, bool weighted, typename Index>
Tally tally_rows(const RowTable& t, const Pooling& p, int64_t begin, int64_t end) {
  Tally tally;
  const auto* indices = static_cast<const Index*>(p.indices);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t index = indices[i];
    if (index == p.padding) continue;
    tally.add<K, weighted>(t.data + index * t.stride, t, weighted ? p.weights[i] : 1.0f);
  }
  return tally;
}

template <RowKind K>
Tally tally_of(const RowTable& t, const Pooling& p, int64_t begin, int64_t end) {
  if (p.weights != nullptr) {
    return p.wide ? tally_rows<K, true, int64_t>(t, p, begin, end)
                  : tally_rows<K, true, int32_t>(t, p, begin, end);
  }
  return p.wide ? tally_rows<K, false, int64_t>(t, p, begin, end)
                : tally_rows<K, false, int32_t>(t, p, begin, end);
}

// The totals of the partial sums of a panel.
struct Energy {
  double walk = 0, end = 0;
};

template <RowKind K, int N>
void pool_panel(
    const RowTable& t, const Pooling& p, int64_t begin, int64_t end, const Panel& panel, float* out,
    Energy& energy, int64_t& outside) {
  Vec sums[N];
  for (int v = 0; v < N; ++v) sums[v] = Vec{};
  Vec squares{};
  int64_t pooled = 0;
  const bool weighted = p.weights != nullptr;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t index = index_at(p, i);
    if (panel.first) {
      if (static_cast<uint64_t>(index) >= static_cast<uint64_t>(t.rows)) {
        outside = i;
        return;
      }
      if (p.prefetch) prefetch(t, p, i + kAhead);
    }
    if (index == p.padding) continue;
    const uint8_t* row = t.data + index * t.stride;
    const float weight = weighted ? p.weights[i] : 1.0f;
    const Parameters of_row = parameters<K>(row, t.layout);
    const Vec scale = broadcast(of_row.scale * weight);
    const Vec bias = broadcast(of_row.bias * weight);
    for (int v = 0; v < N; ++v) {
      const int64_t column = panel.column + v * kLanes;
      const bool whole = v < N - 1 || panel.last == kLanes;
      const Vec x = whole ? load<K>(row, column) : load_some<K>(row, column, panel.last);
      if constexpr (K == RowKind::u8 || K == RowKind::u4) {
        sums[v] = fma(x, scale, sums[v] + bias);
      } else {
        sums[v] = fma(x, scale, sums[v]);
      }
    }
    ++pooled;
    if (panel.check && pooled % kSampled == 0) {
      for (int v = 0; v < N - 1; ++v) squares = fma(sums[v], sums[v], squares);
      const Vec last = first_of(sums[N - 1], panel.last);
      squares = fma(last, last, squares);
    }
  }
  const float inverse = p.mean && pooled > 0 ? 1.0f / static_cast<float>(pooled) : 1.0f;
  Vec ends{};
  for (int v = 0; v < N; ++v) {
    const int64_t kept = v < N - 1 ? kLanes : panel.last;
    if (panel.check) {
      const Vec kept_sums = first_of(sums[v], kept);
      ends = fma(kept_sums, kept_sums, ends);
    }
    if (p.mean) sums[v] *= inverse;
    store(out + panel.column + v * kLanes, sums[v], kept);
  }
  if (!panel.check) return;
  const double of_ends = total(ends);
  energy.end += of_ends;
  energy.walk += kSampled * total(squares) + static_cast<double>(pooled % kSampled) * of_ends;
}

// Variance of Σ_j r_j R_j: two roundings a row, each of a partial sum or of one row more; those of
// scale · weight and bias · weight; underflow; and of a mean, of 1/n and of the product with it.
template <RowKind K>
void conclude(
    const RowTable& t, const Pooling& p, const Tally& tally, const Energy& energy, Expected& e) {
  const double n = static_cast<double>(tally.pooled > 0 ? tally.pooled : 1);
  const double dim = static_cast<double>(t.dim);
  double variance =
      kRounding * kRounding / 3 * (2 * energy.walk + 2 * dim * tally.peaks<K>() + tally.rounded()) +
      2 * n * dim * 0x1p-252;
  e.sum = tally.sum();
  if (p.mean) {
    e.sum /= n;
    variance /= n * n;
    variance += kRounding * kRounding * (e.sum * e.sum + energy.end / (3 * n * n));
  }
  e.variance = variance;
  e.guarded = (tally.mismatch & 255u) == 0;
}

template <RowKind K>
void pool_kind(
    const RowTable& t, const Pooling& p, int64_t begin, int64_t end, float* out, Expected& e) {
  Energy energy;
  int64_t outside = -1;
  for (int64_t column = 0; column < t.dim && outside < 0;) {
    const int64_t vectors = (t.dim - column + kLanes - 1) / kLanes;
    Panel panel{column, kLanes, column == 0, p.check};
    const auto run = [&](auto width) {
      constexpr int N = decltype(width)::value;
      const int64_t left = t.dim - column - (N - 1) * kLanes;
      panel.last = left < kLanes ? left : kLanes;
      pool_panel<K, N>(t, p, begin, end, panel, out, energy, outside);
      column += N * kLanes;
    };
    if (kMostVectors >= 16 && vectors >= 16)
      run(Width<16>{});
    else if (vectors >= 8)
      run(Width<8>{});
    else if (vectors >= 4)
      run(Width<4>{});
    else if (vectors >= 2)
      run(Width<2>{});
    else
      run(Width<1>{});
  }
  e.outside = outside;
  if (p.check && outside < 0) conclude<K>(t, p, tally_of<K>(t, p, begin, end), energy, e);
}

template <RowKind K>
void expect_kind(
    const RowTable& t, const Pooling& p, int64_t begin, int64_t end, const float* out,
    Expected& e) {
  const Tally tally = tally_of<K>(t, p, begin, end);
  Energy energy;
  Vec squares{};
  for (int64_t j = 0; j < t.dim; j += kLanes) {
    const Vec x = load_first(out + j, t.dim - j < kLanes ? t.dim - j : kLanes);
    squares = fma(x, x, squares);
  }
  const double end_energy = total(squares);
  const double n = static_cast<double>(tally.pooled);
  energy.end = p.mean ? end_energy * n * n : end_energy;
  energy.walk = energy.end * n;
  conclude<K>(t, p, tally, energy, e);
}

template <typename Call>
inline void by_kind(RowKind kind, const Call& call) {
  switch (kind) {
    case RowKind::u8: return call(Kind<RowKind::u8>{});
    case RowKind::u4: return call(Kind<RowKind::u4>{});
    case RowKind::f32: return call(Kind<RowKind::f32>{});
    case RowKind::f16: return call(Kind<RowKind::f16>{});
    case RowKind::bf16: return call(Kind<RowKind::bf16>{});
  }
}

double signed_sum(const float* out, int64_t dim, const float* signs) {
  Wide sums{};
  for (int64_t j = 0; j < dim; j += kLanes) {
    const int64_t count = dim - j < kLanes ? dim - j : kLanes;
    add_wide(sums, load_first(out + j, count) * load_first(signs + j, count));
  }
  return total(sums);
}

bool to_half(const float* from, uint16_t* to, int64_t dim) {
  bool good = true;
  for (int64_t j = 0; j < dim; j += kLanes) {
    const int64_t count = dim - j < kLanes ? dim - j : kLanes;
    store(to + j, to_halves(load_first(from + j, count)), count);
    for (int64_t i = j; i < j + count; ++i) good &= faithful(from[i], to[i]);
  }
  return good;
}

void pool(
    const RowTable& t, const Pooling& p, int64_t begin, int64_t end, float* out, Expected& e) {
  by_kind(t.kind, [&](auto k) { pool_kind<decltype(k)::value>(t, p, begin, end, out, e); });
}

void expect(
    const RowTable& t, const Pooling& p, int64_t begin, int64_t end, const float* out,
    Expected& e) {
  by_kind(t.kind, [&](auto k) { expect_kind<decltype(k)::value>(t, p, begin, end, out, e); });
}

}  // namespace

const BagKernels HOLDFAST_OF_SET(bag_kernels) = {
    &pool, &expect, &signed_sum, &to_half, HOLDFAST_NAME};

}  // namespace holdfast
