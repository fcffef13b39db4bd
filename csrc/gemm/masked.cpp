#include "gemm/masked.h"

#include <ATen/ops/abs.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/isinf.h>
#include <ATen/ops/neg.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/where.h>

#include "core/threshold.h"
#include "core/views.h"

namespace holdfast {

namespace {

constexpr double kSpread = 1024;  // SPREAD in abft/gemm/masked.py
constexpr double kShortestChain = 128;  // LEAST in thresholds/chains.py

// Views elements as integers of the same size, so that they are compared bit for bit.
at::Tensor bits_of(const at::Tensor& t) {
  switch (t.element_size()) {
    case 8: return t.view(at::kLong);
    case 4: return t.view(at::kInt);
    default: return t.view(at::kShort);
  }
}

// Marks the elements of an addend that mask, as `mask_of` in abft/gemm/masked.py does.
at::Tensor mask_of(const at::Tensor& addend) {
  const at::Tensor size = addend.abs(), infinite = size.isinf();
  const at::Tensor finite = at::where(infinite, 0, size);
  const double most = finite.max().item<double>(), least = finite.min().item<double>();
  const bool apart = most >= kLeastMask && least * kSpread <= most;
  return apart ? size.ge(kLeastMask) : infinite;
}

// Marks masked elements of C that are, up to rounding, the unmasked ones plus the addend.
at::Tensor as_masked(const at::Tensor& c, const at::Tensor& unmasked, const Problem& problem) {
  const Format format = format_of(element_of(c.scalar_type()));
  const at::Tensor plain = unmasked.to(at::kDouble);
  const at::Tensor added = problem.addend->to(at::kDouble) * problem.beta;
  const at::Tensor error = (c.to(at::kDouble) - plain - added).abs();
  const double steps = 2 + static_cast<double>(problem.a.size(-1)) / kShortestChain;
  return error.le((added.abs() * steps + plain.abs() * 2) * format.eps);
}

}  // namespace

bool masked(const Problem& p) {
  return p.addend.has_value() && p.beta != 0 && p.addend->numel() > 0 &&
      mask_of(*p.addend).any().item<bool>();
}

Problem without_mask(const Problem& problem) {
  Problem unmasked = problem;
  unmasked.addend = problem.addend->masked_fill(mask_of(*problem.addend), 0);
  return unmasked;
}

int64_t rows_that_contradict(
    const at::Tensor& c, const at::Tensor& unmasked, const Problem& problem) {
  const at::Tensor addend = problem.beta < 0 ? problem.addend->neg() : *problem.addend;
  const at::Tensor infinite = addend.isinf();
  const at::Tensor expected = at::where(infinite, addend, unmasked);
  const at::Tensor finite = mask_of(addend).logical_and(infinite.logical_not());
  at::Tensor wrong = bits_of(c).ne(bits_of(expected)).logical_and(finite.logical_not());
  if (finite.any().item<bool>()) {
    wrong = wrong.logical_or(finite.logical_and(as_masked(c, unmasked, problem).logical_not()));
  }
  return wrong.any(-1).sum().item<int64_t>();
}

}  // namespace holdfast
