#include "gemm/masked.h"

#include <ATen/ops/isinf.h>
#include <ATen/ops/nan_to_num.h>
#include <ATen/ops/neg.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/where.h>

#include <cmath>
#include <limits>

namespace holdfast {

namespace {

// Views elements as integers of the same size, so that they are compared bit for bit.
at::Tensor bits_of(const at::Tensor& t) {
  switch (t.element_size()) {
    case 8: return t.view(at::kLong);
    case 4: return t.view(at::kInt);
    default: return t.view(at::kShort);
  }
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
  const at::Tensor addend = problem.beta < 0 ? problem.addend->neg() : *problem.addend;
  const at::Tensor expected = at::where(addend.isinf(), addend, unmasked);
  return bits_of(c).ne(bits_of(expected)).any(-1).sum().item<int64_t>();
}

}  // namespace holdfast
