#include "gemm/masked.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "core/threshold.h"
#include "core/views.h"

namespace holdfast {

namespace {

constexpr double kSpread = 1024;  // SPREAD in abft/gemm/masked.py
constexpr double kShortestChain = 128;  // LEAST in thresholds/chains.py

// Elements as integers. Those of magnitudes are ordered as these are, with NaN above INF.
template <typename T>
using Bits = std::conditional_t<
    sizeof(T) == 8, int64_t, std::conditional_t<sizeof(T) == 4, int32_t, int16_t>>;
template <typename T>
constexpr Bits<T> kMagnitude = std::numeric_limits<Bits<T>>::max();

template <typename T>
Bits<T> bits_of(double value) {
  const T element = static_cast<T>(value);
  Bits<T> bits;
  std::memcpy(&bits, &element, sizeof bits);
  return bits;
}

template <typename T>
double value_of(Bits<T> bits) {
  T element;
  std::memcpy(&element, &bits, sizeof element);
  return static_cast<double>(element);
}

template <typename T>
const Bits<T>* elements(const at::Tensor& t) {
  return static_cast<const Bits<T>*>(t.const_data_ptr());
}

// Elements without gaps between them, in the order of memory.
at::Tensor dense(const at::Tensor& t) {
  return t.is_non_overlapping_and_dense() ? t : t.contiguous();
}

template <typename T>
double least_mask(const at::Tensor& addend) {
  const Bits<T>* data = elements<T>(addend);
  const Bits<T> infinite = bits_of<T>(std::numeric_limits<double>::infinity());
  Bits<T> most = 0, least = kMagnitude<T>, largest = 0;
  for (int64_t i = 0; i < addend.numel(); ++i) {
    const Bits<T> size = data[i] & kMagnitude<T>, finite = size == infinite ? 0 : size;
    largest = std::max(largest, size);
    most = std::max(most, finite);
    least = std::min(least, finite);
  }
  const double high = value_of<T>(most), low = value_of<T>(least);  // NaN is not apart
  if (high >= kLeastMask && low * kSpread <= high) return kLeastMask;
  if (largest < infinite) return 0;
  return std::any_of(
             data, data + addend.numel(),
             [&](Bits<T> x) { return (x & kMagnitude<T>) == infinite; })
      ? std::numeric_limits<double>::infinity()
      : 0;
}

template <typename T>
void copy_unmasked(const at::Tensor& addend, const at::Tensor& to, double least) {
  const Bits<T>* data = elements<T>(addend);
  auto* out = static_cast<Bits<T>*>(to.mutable_data_ptr());
  const Bits<T> infinite = bits_of<T>(std::numeric_limits<double>::infinity());
  const Bits<T> first = bits_of<T>(least);
  at::parallel_for(0, addend.numel(), kElementsPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Bits<T> size = data[i] & kMagnitude<T>;
      out[i] = size >= first && size <= infinite ? 0 : data[i];
    }
  });
}

// Compares a row of C with the unmasked product. INF must be that of the addend, or its negative,
// and a finite mask must be added up to rounding.
template <typename T>
class Comparison {
 public:
  Comparison(const Problem& problem, double least)
      : least_(bits_of<T>(least)),
        beta_(problem.beta),
        eps_(format_of(element_of(problem.a.scalar_type())).eps),
        steps_(2 + static_cast<double>(problem.a.size(-1)) / kShortestChain) {}

  bool contradicts(const Bits<T>* c, const Bits<T>* plain, const Bits<T>* addend, int64_t n) const {
    const Bits<T> sign = beta_ < 0 ? std::numeric_limits<Bits<T>>::min() : 0;
    Bits<T> differs = 0;
    for (int64_t j = 0; j < n; ++j) {
      const Bits<T> size = addend[j] & kMagnitude<T>, masked = addend[j] ^ sign;
      const Bits<T> expected = size == infinite_ ? masked : plain[j];
      const Bits<T> finite = size >= least_ && size < infinite_ ? 0 : -1;
      differs |= (c[j] ^ expected) & finite;
    }
    bool wrong = differs != 0;
    for (int64_t j = 0; least_ < infinite_ && j < n; ++j) {
      const Bits<T> size = addend[j] & kMagnitude<T>;
      if (size >= least_ && size < infinite_) wrong |= !added(c[j], plain[j], addend[j]);
    }
    return wrong;
  }

 private:
  bool added(Bits<T> c, Bits<T> plain, Bits<T> addend) const {
    const double product = value_of<T>(plain), mask = value_of<T>(addend) * beta_;
    const double error = std::abs(value_of<T>(c) - product - mask);
    return error <= (std::abs(mask) * steps_ + std::abs(product) * 2) * eps_;
  }

  Bits<T> infinite_ = bits_of<T>(std::numeric_limits<double>::infinity());
  Bits<T> least_;
  double beta_, eps_, steps_;
};

// A batch whose rows are contiguous.
MatrixBatch by_rows(const at::Tensor& t, const at::Tensor& like) {
  const at::Tensor full = t.expand_as(like);
  return MatrixBatch(full.stride(-1) == 1 ? full : full.contiguous());
}

}  // namespace

double least_mask(const Problem& p) {
  if (!p.addend.has_value() || p.beta == 0 || p.addend->numel() == 0) return 0;
  const at::Tensor addend = dense(*p.addend);
  return AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, addend.scalar_type(), "least_mask",
      [&] { return least_mask<scalar_t>(addend); });
}

Problem without_mask(const Problem& problem, double least) {
  const at::Tensor addend = dense(*problem.addend);
  Problem unmasked = problem;
  unmasked.addend = at::empty_like(addend);
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, addend.scalar_type(), "without_mask",
      [&] { copy_unmasked<scalar_t>(addend, *unmasked.addend, least); });
  return unmasked;
}

int64_t rows_that_contradict(
    const at::Tensor& c, const at::Tensor& unmasked, const Problem& problem, double least) {
  const MatrixBatch of_c = by_rows(c, c), plain = by_rows(unmasked, c);
  const MatrixBatch addend = by_rows(*problem.addend, c);
  std::atomic<int64_t> count{0};
  AT_DISPATCH_FLOATING_TYPES_AND2(
      at::kHalf, at::kBFloat16, c.scalar_type(), "rows_that_contradict", [&] {
        const Comparison<scalar_t> comparison(problem, least);
        const auto row = [](const MatrixBatch& t, int64_t batch, int64_t i) {
          return static_cast<const Bits<scalar_t>*>(rows_of(t, batch, i, i + 1).data);
        };
        const int64_t columns = of_c.size(2);
        for_row_blocks(of_c, 3 * columns, kRowsPerTask, [&](int64_t b, int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) {
            count += comparison.contradicts(
                row(of_c, b, i), row(plain, b, i), row(addend, b, i), columns);
          }
        });
      });
  return count;
}

}  // namespace holdfast
