#include "gemm/intercept.h"

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
#include <optional>

#include "attention/attention.h"
#include "conv/intercept.h"
#include "core/callbacks.h"
#include "core/laps.h"
#include "gemm/encode.h"
#include "gemm/encoding_cache.h"
#include "gemm/guarded.h"
#include "gemm/linear_reuse.h"
#include "gemm/masked.h"
#include "gemm/verify.h"

namespace holdfast {

namespace {

// A product and its result, whose rows are compared with their checksums.
struct Verified {
  Problem problem;
  at::Tensor output;
};

// Counts the suspect rows of a product, of which `verdict` says how far they are off. One whose
// addend masks elements is computed again without the mask, `verified` is then that product, and C
// must agree with it; Python decides on suspect rows.
template <typename With>
int64_t suspects_of(
    Verified& verified, const Encoding& encoding, Sharing& sharing, const With& with,
    at::Tensor& verdict) {
  sharing.ask_mask = true;
  const Bypass bypass;
  const int64_t found =
      count_suspects(verified.output, verified.problem, encoding, sharing, &verdict);
  const double least = sharing.least_mask;
  if (least == 0) return found;
  sharing.ask_mask = false;
  const Verified given = verified;
  verified.problem = without_mask(given.problem, least);
  verified.output = with(*verified.problem.addend);
  const int64_t suspects = std::max(
      count_suspects(verified.output, verified.problem, encoding, sharing),
      rows_that_contradict(given.output, verified.output, given.problem, least));
  if (suspects > 0) verdict = verify(given.output, given.problem, encoding);
  return suspects;
}

// Runs one GEMM with its check, its counters and its events. `first` writes the caller's output,
// `with` computes the same result with the same kernel and a given addend into fresh memory.
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
  std::optional<KnownEncoding> known;
  if (!succeeds(key, [&] { known.emplace(encoding_of(problem.b, key.role)); })) {
    count_unverified(key, kFailed);
    return alone(first);
  }
  const Encoding& encoding = known->encoding;
  if (known->damaged) on_damaged_encoding(key);
  visit(Stage::checksum, key, problem, encoding, {});
  visit(Stage::operand, key, problem, encoding, {});
  seconds.encode = laps.lap();
  at::Tensor output = alone(first);
  seconds.product = laps.lap();
  visit(Stage::output, key, problem, encoding, output);
  if (!verifying()) return output;
  Verified verified{problem, output};
  int64_t suspects = 0;
  at::Tensor verdict;
  const bool done = succeeds(key, [&] {
    Sharing sharing = sharing_for(problem, *known, key.role, sums_columns(problem.a));
    suspects = suspects_of(verified, encoding, sharing, with, verdict);
    share(problem, sharing, false);
    seconds.verify = laps.lap();
  });
  if (!done) {
    count_unverified(key, kFailed);
    return output;
  }
  const int64_t rows = output.numel() / output.size(-1);
  const bool sample = count_verified(key, rows, suspects, seconds);
  if (sample) {
    succeeds(
        key, [&] { note_line(key, detection_line(verified.output, verified.problem, encoding)); });
  }
  if (suspects > 0) {
    const auto compute = [&](const std::optional<at::Tensor>& addend) {
      return with(addend ? *addend : problem.addend.value_or(at::Tensor()));
    };
    on_suspect({key, problem, output, encoding, verdict, known->kept, compute});
  }
  return output;
}

// Makes a tensor of the same layout, at an address that kernels treat alike: those of vectors round
// by its distance from the beginning of a cache line.
at::Tensor like(const at::Tensor& out) {
  if (out.numel() == 0) return at::empty_strided(out.sizes(), out.strides(), out.options());
  int64_t extent = 1;
  for (int64_t d = 0; d < out.dim(); ++d) extent += (out.size(d) - 1) * out.stride(d);
  constexpr uintptr_t line = 64;
  const int64_t size = out.element_size();
  const at::Tensor memory = at::empty({extent + static_cast<int64_t>(line) / size}, out.options());
  const auto address = [](const at::Tensor& t) {
    return reinterpret_cast<uintptr_t>(t.const_data_ptr());
  };
  const int64_t shift = static_cast<int64_t>((address(out) - address(memory)) % line) / size;
  return memory.as_strided(out.sizes(), out.strides(), shift);
}

using at::Scalar;
using at::Tensor;

// Products without an addend: torch's kernel that allocates its output, and the one that does not.
struct Mm {
  static constexpr Op op = Op::mm;
  static constexpr auto run = at::cpu::mm;
  static constexpr auto out = at::cpu::mm_out;
};
struct Bmm {
  static constexpr Op op = Op::bmm;
  static constexpr auto run = at::cpu::bmm;
  static constexpr auto out = at::cpu::bmm_out;
};

template <typename Fn>
Tensor product(const Tensor& a, const Tensor& b) {
  const auto run = [&] { return Fn::run(a, b); };
  const auto with = [&](const Tensor&) { return run(); };
  return intercepting() ? checked(Fn::op, {std::nullopt, a, b}, run, with) : run();
}

template <typename Fn>
Tensor& product_out(const Tensor& a, const Tensor& b, Tensor& out) {
  const auto first = [&] { return Fn::out(out, a, b); };
  const auto with = [&](const Tensor&) {
    Tensor fresh = like(out);
    return Fn::out(fresh, a, b);
  };
  if (!intercepting() || !verifiable(Fn::op, out, a, b)) return Fn::out(out, a, b);
  checked(Fn::op, {std::nullopt, a, b}, first, with);
  return out;
}

// Products with an addend: `run` allocates its output, `out` and `inplace` do not. All are verified
// as C = beta D + alpha A B, to which `problem` and `shaped` convert a call.
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
  static constexpr auto run = at::cpu::addmm;
  static constexpr auto out = at::cpu::addmm_out;
  static constexpr auto inplace = at::cpu::addmm_;
};
struct Baddbmm : Matrices {
  static constexpr Op op = Op::baddbmm;
  static constexpr auto run = at::cpu::baddbmm;
  static constexpr auto out = at::cpu::baddbmm_out;
  static constexpr auto inplace = at::cpu::baddbmm_;
};
// It is verified as cᵀ = beta dᵀ + alpha xᵀ Aᵀ, so that a weight A has the same checksums as in a
// Linear.
struct Addmv {
  static constexpr Op op = Op::addmv;
  static constexpr auto run = at::cpu::addmv;
  static constexpr auto out = at::cpu::addmv_out;
  static constexpr auto inplace = at::cpu::addmv_;
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
}  // namespace

void install() {
  static std::once_flag once;
  std::call_once(once, [] {
    const Quiet quiet;
    static auto& library = *new torch::Library(
        torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__);
    library.impl("mm", TORCH_FN(product<Mm>));
    library.impl("mm.out", TORCH_FN(product_out<Mm>));
    library.impl("bmm", TORCH_FN(product<Bmm>));
    library.impl("bmm.out", TORCH_FN(product_out<Bmm>));
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
    intercept_convolutions(library);
    intercept_uncovered_ops();
  });
}

}  // namespace holdfast
