#include "gemm/masked.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <atomic>
#include <limits>

#include "core/instruction_sets.h"
#include "core/threshold.h"
#include "core/views.h"
#include "gemm/mask_passes.h"

namespace holdfast {

namespace {

constexpr double kSpread = 1024;  // SPREAD in abft/gemm/masked.py
constexpr double kShortestChain = 128;  // LEAST in thresholds/chains.py

const MaskPasses& mask_passes() {
  static const MaskPasses& chosen = beside_reductions<MaskPasses>({HOLDFAST_SETS(mask_passes)});
  return chosen;
}

// A magnitude, and the value that has it.
int64_t magnitude_of(Element element, double value) {
  switch (element) {
    case Element::f64: return __builtin_bit_cast(int64_t, value);
    case Element::f32: return __builtin_bit_cast(int32_t, static_cast<float>(value));
    case Element::f16: return c10::Half(static_cast<float>(value)).x;
    default: return c10::BFloat16(static_cast<float>(value)).x;
  }
}
double value_of(Element element, int64_t magnitude) {
  switch (element) {
    case Element::f64: return __builtin_bit_cast(double, magnitude);
    case Element::f32: return __builtin_bit_cast(float, static_cast<int32_t>(magnitude));
    case Element::f16: return c10::Half(static_cast<uint16_t>(magnitude), c10::Half::from_bits());
    default: return c10::BFloat16(static_cast<uint16_t>(magnitude), c10::BFloat16::from_bits());
  }
}

const char* at_element(const at::Tensor& t, int64_t i) {
  return static_cast<const char*>(t.const_data_ptr()) + i * t.element_size();
}

// Elements without gaps between them, in the order of memory.
at::Tensor dense(const at::Tensor& t) {
  return t.is_non_overlapping_and_dense() ? t : t.contiguous();
}

// A batch whose rows are contiguous.
MatrixBatch by_rows(const at::Tensor& t, const at::Tensor& like) {
  const at::Tensor full = t.expand_as(like);
  return MatrixBatch(full.stride(-1) == 1 ? full : full.contiguous());
}

}  // namespace

double least_mask(const Problem& p) {
  if (!p.addend.has_value() || p.beta == 0 || p.addend->numel() == 0) return 0;
  const at::Tensor addend = dense(*p.addend);
  const Element element = element_of(addend.scalar_type());
  const Magnitudes found = at::parallel_reduce(
      0, addend.numel(), kElementsPerThread, Magnitudes{},
      [&](int64_t begin, int64_t end, Magnitudes of) {
        mask_passes().magnitudes(element, at_element(addend, begin), end - begin, of);
        return of;
      },
      [](Magnitudes a, const Magnitudes& b) {
        return Magnitudes{
            std::max(a.most, b.most), std::min(a.least, b.least), a.infinite || b.infinite};
      });
  const double high = value_of(element, found.most);  // A NaN is no mask.
  if (high >= kLeastMask && value_of(element, found.least) * kSpread <= high) return kLeastMask;
  return found.infinite ? std::numeric_limits<double>::infinity() : 0;
}

Problem without_mask(const Problem& problem, double least) {
  const at::Tensor addend = dense(*problem.addend);
  const Element element = element_of(addend.scalar_type());
  const int64_t first = magnitude_of(element, least);
  Problem unmasked = problem;
  unmasked.addend = at::empty_like(addend);
  char* to = static_cast<char*>(unmasked.addend->mutable_data_ptr());
  at::parallel_for(0, addend.numel(), kElementsPerThread, [&](int64_t begin, int64_t end) {
    mask_passes().unmask(
        element, at_element(addend, begin), end - begin, first, to + begin * addend.element_size());
  });
  return unmasked;
}

int64_t rows_that_contradict(
    const at::Tensor& c, const at::Tensor& unmasked, const Problem& problem, double least) {
  const MatrixBatch of_c = by_rows(c, c), plain = by_rows(unmasked, c);
  const MatrixBatch addend = by_rows(*problem.addend, c);
  const Element element = element_of(c.scalar_type());
  const double eps = format_of(element_of(problem.a.scalar_type())).eps;
  // Narrower elements are added up in fp32.
  const double finer = std::min<double>(1, std::numeric_limits<float>::epsilon() / eps);
  const Masking masking{
      element, magnitude_of(element, least), problem.beta, eps,
      2 + finer * static_cast<double>(problem.a.size(-1)) / kShortestChain};
  std::atomic<int64_t> count{0};
  const int64_t columns = of_c.size(2);
  for_row_blocks(of_c, 3 * columns, kRowsPerTask, [&](int64_t b, int64_t begin, int64_t end) {
    int64_t found = 0;
    for (int64_t i = begin; i < end; ++i) {
      const auto row = [&](const MatrixBatch& t) { return rows_of(t, b, i, i + 1).data; };
      found += mask_passes().contradicts(masking, row(of_c), row(plain), row(addend), columns);
    }
    count += found;
  });
  return count;
}

}  // namespace holdfast
