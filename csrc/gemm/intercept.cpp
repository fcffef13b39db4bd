#include "gemm/intercept.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/_addmm_activation_cpu_dispatch.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/addmv_cpu_dispatch.h>
#include <ATen/ops/baddbmm_cpu_dispatch.h>
#include <ATen/ops/bmm_cpu_dispatch.h>
#include <ATen/ops/dot_cpu_dispatch.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>

#include "attention/attention.h"
#include "core/callbacks.h"
#include "core/laps.h"
#include "gemm/encoding_cache.h"
#include "gemm/linear_reuse.h"
#include "gemm/masked.h"
#include "gemm/verify.h"

namespace holdfast {

namespace {

constexpr const char* kNoThreshold = "dtype has no rounding threshold";

// Empty products have nothing to verify; those of unfit shapes get torch's own error.
bool well_formed(const Problem& p) {
  const int64_t dim = p.a.dim();
  return (dim == 2 || dim == 3) && p.b.dim() == dim && p.a.size(-1) == p.b.size(-2) &&
      (dim == 2 || p.a.size(0) == p.b.size(0)) && p.a.numel() > 0 && p.b.numel() > 0;
}

// A kernel that calls others on the way (fp16 without a kernel of its own) counts as one product.
template <typename Run>
at::Tensor alone(const Run& run) {
  const Bypass bypass;
  return run();
}

// Suspect rows of a product whose addend masks elements with INF: none, or some to be decided on in
// Python. Without the mask it can be verified, and C must agree with it.
template <typename With>
int64_t suspects_beside_mask(
    const at::Tensor& output, const Problem& problem, const Encoding& encoding, Sharing& sharing,
    const With& with) {
  const Bypass bypass;
  const Problem unmasked = without_mask(problem);
  const at::Tensor again = with(*unmasked.addend);
  const int64_t suspects = count_suspects(again, unmasked, encoding, sharing);
  return std::max(suspects, rows_that_contradict(output, again, problem));
}

// Runs one GEMM with everything around it. `first` writes the caller's output, `with` computes the
// same result with the same kernel and a given addend into fresh memory.
template <typename First, typename With>
at::Tensor checked(Op op, const Problem& problem, const First& first, const With& with) {
  const SiteKey key = current_site(op);
  if (!well_formed(problem)) return first();
  if (!supported(problem.a) || problem.a.scalar_type() != problem.b.scalar_type()) {
    count_unverified(key, kNoThreshold);
    return first();
  }
  Laps laps;
  Durations seconds;
  const auto [encoding, kept, damaged] = encoding_of(problem.b, key.role);
  if (damaged) on_damaged_encoding(key);
  visit(Stage::checksum, key, problem, encoding, {});
  visit(Stage::operand, key, problem, encoding, {});
  seconds.encode = laps.lap();
  at::Tensor output = alone(first);
  seconds.product = laps.lap();
  visit(Stage::output, key, problem, encoding, output);
  if (!verifying()) return output;
  Sharing sharing = sharing_for(problem, encoding, key.role);
  int64_t suspects = 0;
  if (problem.addend.has_value() && problem.addend->dim() > 1 && masked(problem)) {  // no bias
    suspects = suspects_beside_mask(output, problem, encoding, sharing, with);
  } else {
    suspects = count_suspects(output, problem, encoding, sharing);
    Sharing nothing;
    if (suspects > 0 && masked(problem)) {
      suspects = suspects_beside_mask(output, problem, encoding, nothing, with);
    }
  }
  share(problem, sharing);
  seconds.verify = laps.lap();
  const int64_t rows = output.numel() / output.size(-1);
  const bool sample = count_verified(key, rows, suspects, seconds);
  if (sample) note_line(key, detection_line(output, problem, encoding));
  if (suspects > 0) {
    const Bypass bypass;
    const at::Tensor verdict = verify(output, problem, encoding);
    const auto rerun = [&] { return with(problem.addend.value_or(at::Tensor())); };
    on_suspect({key, problem, output, encoding, verdict, kept, rerun});
  }
  return output;
}

// Whether a product may be verified that is written to `out`; if not, it is counted.
bool verifiable(Op op, const at::Tensor& out, const at::Tensor& a, const at::Tensor& b) {
  // For memory with gaps the overlap status is "too hard" even between different storages.
  const auto clear_of = [&](const at::Tensor& operand) {
    return !out.is_alias_of(operand) ||
        at::get_overlap_status(out, operand) == at::MemOverlapStatus::No;
  };
  const bool apart = clear_of(a) && clear_of(b);
  if (!apart) count_unverified(current_site(op), "its output overlaps an operand");
  return apart;
}

bool verifiable(Op op, const at::Scalar& beta, const at::Scalar& alpha) {
  const bool real = !beta.isComplex() && !alpha.isComplex();
  if (!real) count_unverified(current_site(op), kNoThreshold);
  return real;
}

at::Tensor like(const at::Tensor& out) {
  return at::empty_strided(out.sizes(), out.strides(), out.options());
}

using at::Scalar;
using at::Tensor;

Tensor mm(const Tensor& a, const Tensor& b) {
  const auto run = [&] { return at::cpu::mm(a, b); };
  const auto with = [&](const Tensor&) { return run(); };
  return intercepting() ? checked(Op::mm, {std::nullopt, a, b}, run, with) : run();
}

Tensor& mm_out(const Tensor& a, const Tensor& b, Tensor& out) {
  const auto first = [&] { return at::cpu::mm_out(out, a, b); };
  const auto with = [&](const Tensor&) {
    Tensor fresh = like(out);
    return at::cpu::mm_out(fresh, a, b);
  };
  if (!intercepting() || !verifiable(Op::mm, out, a, b)) return at::cpu::mm_out(out, a, b);
  checked(Op::mm, {std::nullopt, a, b}, first, with);
  return out;
}

Tensor bmm(const Tensor& a, const Tensor& b) {
  const auto run = [&] { return at::cpu::bmm(a, b); };
  const auto with = [&](const Tensor&) { return run(); };
  return intercepting() ? checked(Op::bmm, {std::nullopt, a, b}, run, with) : run();
}

Tensor& bmm_out(const Tensor& a, const Tensor& b, Tensor& out) {
  const auto first = [&] { return at::cpu::bmm_out(out, a, b); };
  const auto with = [&](const Tensor&) {
    Tensor fresh = like(out);
    return at::cpu::bmm_out(fresh, a, b);
  };
  if (!intercepting() || !verifiable(Op::bmm, out, a, b)) return at::cpu::bmm_out(out, a, b);
  checked(Op::bmm, {std::nullopt, a, b}, first, with);
  return out;
}

// The products with an addend: `run` allocates, `out` and `inplace` do not. What is verified is
// always C = beta D + alpha A B: `problem` and `shaped` say how a call is one.
struct Matrices {
  static bool fits(const Tensor&, const Tensor&) { return true; }
  static const Tensor& shaped(const Tensor& t) { return t; }
  static const Tensor& unshaped(const Tensor& t) { return t; }
  static Problem problem(
      const Tensor& self, const Tensor& a, const Tensor& b, const Scalar& beta,
      const Scalar& alpha) {
    return {self, a, b, beta.toDouble(), alpha.toDouble()};
  }
};
struct Addmm : Matrices {
  static constexpr Op op = Op::addmm;
  template <typename... Args>
  static Tensor run(const Args&... args) {
    return at::cpu::addmm(args...);
  }
  template <typename... Args>
  static Tensor& out(Tensor& out, const Args&... args) {
    return at::cpu::addmm_out(out, args...);
  }
  template <typename... Args>
  static Tensor& inplace(Tensor& self, const Args&... args) {
    return at::cpu::addmm_(self, args...);
  }
};
struct Baddbmm : Matrices {
  static constexpr Op op = Op::baddbmm;
  template <typename... Args>
  static Tensor run(const Args&... args) {
    return at::cpu::baddbmm(args...);
  }
  template <typename... Args>
  static Tensor& out(Tensor& out, const Args&... args) {
    return at::cpu::baddbmm_out(out, args...);
  }
  template <typename... Args>
  static Tensor& inplace(Tensor& self, const Args&... args) {
    return at::cpu::baddbmm_(self, args...);
  }
};
// cᵀ = beta dᵀ + alpha xᵀ Aᵀ, so that a weight A has the checksums it has in a Linear.
struct Addmv {
  static constexpr Op op = Op::addmv;
  template <typename... Args>
  static Tensor run(const Args&... args) {
    return at::cpu::addmv(args...);
  }
  template <typename... Args>
  static Tensor& out(Tensor& out, const Args&... args) {
    return at::cpu::addmv_out(out, args...);
  }
  template <typename... Args>
  static Tensor& inplace(Tensor& self, const Args&... args) {
    return at::cpu::addmv_(self, args...);
  }
  static bool fits(const Tensor& a, const Tensor& x) { return a.dim() == 2 && x.dim() == 1; }
  static Tensor shaped(const Tensor& t) { return t.dim() == 1 ? t.unsqueeze(0) : t; }
  static Tensor unshaped(const Tensor& t) { return t.dim() == 2 ? t.squeeze(0) : t; }
  static Problem problem(
      const Tensor& self, const Tensor& a, const Tensor& x, const Scalar& beta,
      const Scalar& alpha) {
    return {shaped(self), shaped(x), a.t(), beta.toDouble(), alpha.toDouble()};
  }
};

template <typename Fn>
bool to_verify(const Tensor& a, const Tensor& b, const Scalar& beta, const Scalar& alpha) {
  return intercepting() && Fn::fits(a, b) && verifiable(Fn::op, beta, alpha);
}

template <typename Fn>
Tensor fused(
    const Tensor& self, const Tensor& a, const Tensor& b, const Scalar& beta, const Scalar& alpha) {
  if (!to_verify<Fn>(a, b, beta, alpha)) return Fn::run(self, a, b, beta, alpha);
  Tensor result;
  const auto first = [&]() -> Tensor {
    return Fn::shaped(result = Fn::run(self, a, b, beta, alpha));
  };
  const auto with = [&](const Tensor& addend) -> Tensor {
    return Fn::shaped(Fn::run(Fn::unshaped(addend), a, b, beta, alpha));
  };
  checked(Fn::op, Fn::problem(self, a, b, beta, alpha), first, with);
  return result;
}

template <typename Fn>
Tensor& fused_out(
    const Tensor& self, const Tensor& a, const Tensor& b, const Scalar& beta, const Scalar& alpha,
    Tensor& out) {
  if (!to_verify<Fn>(a, b, beta, alpha) || !verifiable(Fn::op, out, a, b)) {
    return Fn::out(out, self, a, b, beta, alpha);
  }
  const Tensor before = out.is_alias_of(self) ? self.clone() : self;
  const auto first = [&]() -> Tensor { return Fn::shaped(Fn::out(out, self, a, b, beta, alpha)); };
  const auto with = [&](const Tensor& addend) -> Tensor {
    Tensor fresh = like(out);
    return Fn::shaped(Fn::out(fresh, Fn::unshaped(addend), a, b, beta, alpha));
  };
  checked(Fn::op, Fn::problem(before, a, b, beta, alpha), first, with);
  return out;
}

template <typename Fn>
Tensor& fused_inplace(
    Tensor& self, const Tensor& a, const Tensor& b, const Scalar& beta, const Scalar& alpha) {
  if (!to_verify<Fn>(a, b, beta, alpha) || !verifiable(Fn::op, self, a, b)) {
    return Fn::inplace(self, a, b, beta, alpha);
  }
  const Tensor before = like(self).copy_(self);
  const auto first = [&]() -> Tensor { return Fn::shaped(Fn::inplace(self, a, b, beta, alpha)); };
  const auto with = [&](const Tensor& addend) -> Tensor {
    Tensor fresh = like(before).copy_(Fn::unshaped(addend));
    return Fn::shaped(Fn::inplace(fresh, a, b, beta, alpha));
  };
  checked(Fn::op, Fn::problem(before, a, b, beta, alpha), first, with);
  return self;
}

Tensor dot(const Tensor& a, const Tensor& b) {
  note_uncovered(Op::dot);
  return at::cpu::dot(a, b);
}
Tensor addmm_activation(
    const Tensor& self, const Tensor& a, const Tensor& b, const Scalar& beta, const Scalar& alpha,
    bool use_gelu) {
  note_uncovered(Op::addmm_activation);
  return at::cpu::_addmm_activation(self, a, b, beta, alpha, use_gelu);
}
class Quiet : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

}  // namespace

void install() {
  static std::once_flag once;
  std::call_once(once, [] {
    // Overriding a kernel is what is wanted here, torch's warning about it would only alarm.
    Quiet quiet;
    const c10::WarningUtils::WarningHandlerGuard guard(&quiet);
    static auto& library = *new torch::Library(
        torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__);
    library.impl("mm", TORCH_FN(mm));
    library.impl("mm.out", TORCH_FN(mm_out));
    library.impl("bmm", TORCH_FN(bmm));
    library.impl("bmm.out", TORCH_FN(bmm_out));
    library.impl("addmm", TORCH_FN(fused<Addmm>));
    library.impl("addmm.out", TORCH_FN(fused_out<Addmm>));
    library.impl("addmm_", TORCH_FN(fused_inplace<Addmm>));
    library.impl("baddbmm", TORCH_FN(fused<Baddbmm>));
    library.impl("baddbmm.out", TORCH_FN(fused_out<Baddbmm>));
    library.impl("baddbmm_", TORCH_FN(fused_inplace<Baddbmm>));
    library.impl("addmv", TORCH_FN(fused<Addmv>));
    library.impl("addmv.out", TORCH_FN(fused_out<Addmv>));
    library.impl("addmv_", TORCH_FN(fused_inplace<Addmv>));
    library.impl("dot", TORCH_FN(dot));
    library.impl("_addmm_activation", TORCH_FN(addmm_activation));
    intercept_attention(library);
    intercept_uncovered_ops();
  });
}

}  // namespace holdfast
