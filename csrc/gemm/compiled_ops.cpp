// The products of compiled graphs. Each is an op that is opaque to Inductor, carries the name of
// its site, and calls torch's intercepted GEMM kernel.
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/addmm_ops.h>
#include <ATen/ops/baddbmm_ops.h>
#include <ATen/ops/bmm_ops.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm_ops.h>
#include <torch/library.h>

#include <string_view>

#include "core/interception_state.h"
#include "core/sites.h"

namespace holdfast {

namespace {

using at::Scalar;
using at::Tensor;

constexpr c10::DispatchKeySet kCpu(c10::DispatchKey::CPU);

// Runs one of torch's GEMM operators on the CPU as the product of a site.
template <typename Operator, typename... Args>
Tensor compiled(
    const Args&... args, int64_t module, std::string_view op, int64_t ordinal, int64_t role) {
  const Named named(site_key(module, op, ordinal, role));
  return Operator::redispatch(kCpu, args...);
}

struct Verifying {
  Verifying() { change_thread_depth(1); }
  ~Verifying() { change_thread_depth(-1); }
};

// Runs holdfast.matmul of a compiled graph on CPU, verified even if no model is protected.
Tensor compiled_matmul(const Tensor& a, const Tensor& b, int64_t role) {
  const Verifying verifying;
  const Named named(static_cast<Role>(role));
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::impl::ExcludeDispatchKeyGuard below_autocast(c10::autocast_dispatch_keyset);
  return at::matmul(a, b);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(holdfast, m) {
  m.def("mm(Tensor a, Tensor b, int module, str op, int ordinal, int role) -> Tensor");
  m.def("bmm(Tensor a, Tensor b, int module, str op, int ordinal, int role) -> Tensor");
  m.def(
      "addmm(Tensor addend, Tensor a, Tensor b, Scalar beta, Scalar alpha, int module, str op, "
      "int ordinal, int role) -> Tensor");
  m.def(
      "baddbmm(Tensor addend, Tensor a, Tensor b, Scalar beta, Scalar alpha, int module, str op, "
      "int ordinal, int role) -> Tensor");
  m.def("matmul(Tensor a, Tensor b, int role) -> Tensor");
}

TORCH_LIBRARY_IMPL(holdfast, CPU, m) {
  m.impl("mm", &compiled<at::_ops::mm, Tensor, Tensor>);
  m.impl("bmm", &compiled<at::_ops::bmm, Tensor, Tensor>);
  m.impl("addmm", &compiled<at::_ops::addmm, Tensor, Tensor, Tensor, Scalar, Scalar>);
  m.impl("baddbmm", &compiled<at::_ops::baddbmm, Tensor, Tensor, Tensor, Scalar, Scalar>);
  m.impl("matmul", &compiled_matmul);
}

TORCH_LIBRARY_IMPL(holdfast, CUDA, m) { m.impl("matmul", &compiled_matmul); }

}  // namespace holdfast
