#include "masked.h"

#include <ATen/ops/isinf.h>
#include <ATen/ops/nan_to_num.h>
#include <ATen/ops/sum.h>

#include <atomic>
#include <cmath>
#include <limits>

#include "views.h"

namespace holdfast {

namespace {

template <typename Bits>
struct Row {
  Row(const at::Tensor& t, int64_t batch, int64_t row)
      : data(
            static_cast<const Bits*>(t.const_data_ptr()) + batch * t.stride(0) + row * t.stride(1)),
        stride(t.stride(2)) {}
  const Bits* data;
  int64_t stride;
};

// Which bits of a row differ from what they must be, or-ed together.
template <typename Bits>
Bits contradiction(
    const Row<Bits>& c, const Row<Bits>& unmasked, const Row<Bits>& addend, int64_t columns,
    Bits infinity, Bits flip) {
  constexpr Bits kSign = static_cast<Bits>(Bits{1} << (8 * sizeof(Bits) - 1));
  const auto along = [&](int64_t of_c, int64_t of_unmasked, int64_t of_addend) {
    Bits wrong = 0;
    for (int64_t j = 0; j < columns; ++j) {
      const Bits added = addend.data[j * of_addend];
      const bool infinite = static_cast<Bits>(added & ~kSign) == infinity;
      const Bits expected = infinite ? added ^ flip : unmasked.data[j * of_unmasked];
      wrong |= c.data[j * of_c] ^ expected;
    }
    return wrong;
  };
  const bool contiguous = c.stride == 1 && unmasked.stride == 1 && addend.stride == 1;
  return contiguous ? along(1, 1, 1) : along(c.stride, unmasked.stride, addend.stride);
}

template <typename Bits>
int64_t contradictions(
    const at::Tensor& c, const at::Tensor& unmasked, const at::Tensor& addend, Bits infinity,
    bool negated) {
  const Bits flip = negated ? static_cast<Bits>(Bits{1} << (8 * sizeof(Bits) - 1)) : Bits{0};
  std::atomic<int64_t> found{0};
  for_row_blocks(c, 3 * c.size(2), kRowsPerTask, [&](int64_t batch, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const Row<Bits> of_c(c, batch, row), of_unmasked(unmasked, batch, row);
      const Row<Bits> of_addend(addend, batch, row);
      found += contradiction(of_c, of_unmasked, of_addend, c.size(2), infinity, flip) != 0 ? 1 : 0;
    }
  });
  return found;
}

}  // namespace

bool masked(const Problem& p) {
  if (!p.addend.has_value() || p.beta == 0) return false;
  const bool finite = std::isfinite(p.addend->sum().item<double>());
  return !finite && p.addend->isinf().any().item<bool>();
}

Problem without_mask(const Problem& problem) {
  Problem unmasked = problem;
  unmasked.addend = problem.addend->nan_to_num(std::numeric_limits<double>::quiet_NaN(), 0, 0);
  return unmasked;
}

int64_t rows_that_contradict(
    const at::Tensor& c, const at::Tensor& unmasked, const Problem& problem) {
  const at::Tensor left = as_batch(c), right = as_batch(unmasked);
  const at::Tensor addend = problem.addend->expand(left.sizes());
  const bool negated = problem.beta < 0;
  switch (element_of(c.scalar_type())) {
    case Element::f64:
      return contradictions<uint64_t>(left, right, addend, 0x7ff0000000000000u, negated);
    case Element::f32: return contradictions<uint32_t>(left, right, addend, 0x7f800000u, negated);
    case Element::f16: return contradictions<uint16_t>(left, right, addend, 0x7c00u, negated);
    default: return contradictions<uint16_t>(left, right, addend, 0x7f80u, negated);
  }
}

}  // namespace holdfast
