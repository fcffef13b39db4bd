#include "intercept.h"

#include <ATen/CPUFunctions.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <memory>
#include <mutex>
#include <type_traits>

#include "attention.h"
#include "encodings.h"
#include "listed.h"
#include "masked.h"
#include "sharing.h"

namespace holdfast {

namespace {

constexpr const char* kNoThreshold = "dtype has no rounding threshold";

thread_local int thread_depth = 0;
thread_local int thread_bypass = 0;

std::atomic<int> process_depth{0};
std::atomic<bool> armed{false};

// Never destroyed: Python callables must not be released after the interpreter is gone.
struct Shared {
  std::mutex mutex;  // guards everything below
  SuspectHandler suspect_handler;
  DamageHandler damage_handler;
  AttentionHandler attention_handler;
  std::shared_ptr<SiteHook> site_hook;
};
Shared& shared = *new Shared;

bool verifying() {
  return process_depth.load(std::memory_order_relaxed) > 0 || thread_depth > 0;
}

void visit(Stage stage, const SiteKey& key, const Problem& p, const Encoding& e, const at::Tensor& out) {
  if (!armed.load(std::memory_order_relaxed)) return;
  std::shared_ptr<SiteHook> hook;
  {
    const std::lock_guard<std::mutex> lock(shared.mutex);
    hook = shared.site_hook;
  }
  if (hook == nullptr) return;
  const Bypass bypass;
  (*hook)(stage, key, p, e, out);
}

template <typename Handler>
Handler handler(Handler Shared::*which) {
  const std::lock_guard<std::mutex> lock(shared.mutex);
  TORCH_CHECK(shared.*which, "holdfast: a fault was seen but no handler is installed");
  return shared.*which;
}

// Empty products have nothing to verify; those of unfit shapes get torch's own error.
bool well_formed(const Problem& p) {
  const int64_t dim = p.a.dim();
  return (dim == 2 || dim == 3) && p.b.dim() == dim && p.a.size(-1) == p.b.size(-2) &&
      (dim == 2 || p.a.size(0) == p.b.size(0)) && p.a.numel() > 0 && p.b.numel() > 0;
}

// Seconds since the last call.
class Laps {
 public:
  double lap() {
    const auto now = std::chrono::steady_clock::now();
    const std::chrono::duration<double> since = now - last_;
    last_ = now;
    return since.count();
  }

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

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
  if (damaged) {
    const Bypass bypass;
    handler(&Shared::damage_handler)(key);
  }
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
    handler(&Shared::suspect_handler)({key, problem, output, encoding, verdict, kept, rerun});
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

// addmm and baddbmm differ in name only: `Fn::run` allocates, `Fn::out` and `Fn::inplace` do not.
struct Addmm {
  static constexpr Op op = Op::addmm;
  template <typename... Args>
  static Tensor run(const Args&... args) { return at::cpu::addmm(args...); }
  template <typename... Args>
  static Tensor& out(Tensor& out, const Args&... args) { return at::cpu::addmm_out(out, args...); }
  template <typename... Args>
  static Tensor& inplace(Tensor& self, const Args&... args) { return at::cpu::addmm_(self, args...); }
};
struct Baddbmm {
  static constexpr Op op = Op::baddbmm;
  template <typename... Args>
  static Tensor run(const Args&... args) { return at::cpu::baddbmm(args...); }
  template <typename... Args>
  static Tensor& out(Tensor& out, const Args&... args) { return at::cpu::baddbmm_out(out, args...); }
  template <typename... Args>
  static Tensor& inplace(Tensor& self, const Args&... args) { return at::cpu::baddbmm_(self, args...); }
};

Problem with_addend(const Tensor& self, const Tensor& a, const Tensor& b, const Scalar& beta, const Scalar& alpha) {
  return {self, a, b, beta.toDouble(), alpha.toDouble()};
}

template <typename Fn>
Tensor fused(const Tensor& self, const Tensor& a, const Tensor& b, const Scalar& beta, const Scalar& alpha) {
  const auto with = [&](const Tensor& addend) { return Fn::run(addend, a, b, beta, alpha); };
  const auto run = [&] { return with(self); };
  if (!intercepting() || !verifiable(Fn::op, beta, alpha)) return run();
  return checked(Fn::op, with_addend(self, a, b, beta, alpha), run, with);
}

template <typename Fn>
Tensor& fused_out(const Tensor& self, const Tensor& a, const Tensor& b, const Scalar& beta, const Scalar& alpha, Tensor& out) {
  if (!intercepting() || !verifiable(Fn::op, beta, alpha) || !verifiable(Fn::op, out, a, b)) {
    return Fn::out(out, self, a, b, beta, alpha);
  }
  const Tensor before = out.is_alias_of(self) ? self.clone() : self;
  const auto first = [&] { return Fn::out(out, self, a, b, beta, alpha); };
  const auto with = [&](const Tensor& addend) {
    Tensor fresh = like(out);
    return Fn::out(fresh, addend, a, b, beta, alpha);
  };
  checked(Fn::op, with_addend(before, a, b, beta, alpha), first, with);
  return out;
}

template <typename Fn>
Tensor& fused_inplace(Tensor& self, const Tensor& a, const Tensor& b, const Scalar& beta, const Scalar& alpha) {
  if (!intercepting() || !verifiable(Fn::op, beta, alpha) || !verifiable(Fn::op, self, a, b)) {
    return Fn::inplace(self, a, b, beta, alpha);
  }
  Tensor before = like(self).copy_(self);
  const auto first = [&] { return Fn::inplace(self, a, b, beta, alpha); };
  const auto with = [&](const Tensor& addend) {
    Tensor fresh = like(before).copy_(addend);
    return Fn::inplace(fresh, a, b, beta, alpha);
  };
  checked(Fn::op, with_addend(before, a, b, beta, alpha), first, with);
  return self;
}

Tensor addmv(const Tensor& self, const Tensor& a, const Tensor& x, const Scalar& beta, const Scalar& alpha) {
  note_uncovered(Op::addmv);
  return at::cpu::addmv(self, a, x, beta, alpha);
}
Tensor& addmv_out(const Tensor& self, const Tensor& a, const Tensor& x, const Scalar& beta, const Scalar& alpha, Tensor& out) {
  note_uncovered(Op::addmv);
  return at::cpu::addmv_out(out, self, a, x, beta, alpha);
}
Tensor& addmv_inplace(Tensor& self, const Tensor& a, const Tensor& x, const Scalar& beta, const Scalar& alpha) {
  note_uncovered(Op::addmv);
  return at::cpu::addmv_(self, a, x, beta, alpha);
}
Tensor dot(const Tensor& a, const Tensor& b) {
  note_uncovered(Op::dot);
  return at::cpu::dot(a, b);
}
Tensor addmm_activation(const Tensor& self, const Tensor& a, const Tensor& b, const Scalar& beta, const Scalar& alpha, bool use_gelu) {
  note_uncovered(Op::addmm_activation);
  return at::cpu::_addmm_activation(self, a, b, beta, alpha, use_gelu);
}
Attention attention_of(
    const Tensor& q, const Tensor& k, const Tensor& v, bool causal,
    const std::optional<Tensor>& mask, std::optional<double> scale) {
  const double width = q.dim() == 4 ? static_cast<double>(q.size(3)) : 1;
  Attention problem{q, k, v, mask, causal, scale.value_or(1 / std::sqrt(width))};
  if (mask.has_value() && !mask->defined()) problem.mask.reset();
  return problem;
}

// Why a call is left to torch's own kernel, counted; null if it is not.
const char* left_to_torch(const Attention& problem, double dropout, const SiteKey& key) {
  const char* reason = dropout > 0 ? "dropout within fused attention" : unsupported(problem);
  if (reason != nullptr) count_unverified(key, reason);
  return reason;
}

// Our own kernel, with everything around it.
template <typename Run>
auto checked_attention(const SiteKey& key, const Attention& problem, const Run& run) {
  AttentionChecks checks;
  checks.verify = verifying();
  if (armed.load(std::memory_order_relaxed)) {
    checks.probe = [&](Place place, const Tensor& tile, const Tensor& queries, const Tensor& keys) {
      const Problem product{std::nullopt, queries, keys, 1, problem.scale};
      const auto stage = static_cast<Stage>(static_cast<int>(Stage::scores) + static_cast<int>(place));
      visit(stage, key, product, encode(keys), tile);
    };
  }
  Laps laps;
  AttentionReport report;
  auto results = run(checks, report);
  if (!checks.verify) return results;
  Durations seconds;
  seconds.encode = report.encode_s;
  seconds.product = laps.lap() - report.encode_s;
  const int64_t rows = problem.q.size(0) * problem.q.size(1) * problem.q.size(2);
  const bool sample = count_verified(key, rows, report.suspects, seconds);
  if (sample) note_line(key, report.line);
  if (!report.findings.empty()) {
    const Bypass bypass;
    handler(&Shared::attention_handler)(key, report, std::get<0>(results));
  }
  return results;
}

std::tuple<Tensor, Tensor> our_sdpa(
    const Tensor& q, const Tensor& k, const Tensor& v, double dropout, bool causal,
    const std::optional<Tensor>& mask, std::optional<double> scale) {
  const SiteKey key = current_site(Op::sdpa);
  const Attention problem = attention_of(q, k, v, causal, mask, scale);
  if (left_to_torch(problem, dropout, key) != nullptr) {
    return at::cpu::_scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, causal, mask, scale);
  }
  return checked_attention(key, problem, [&](const auto& checks, auto& report) {
    return attention_forward(problem, checks, report);
  });
}

std::tuple<Tensor, Tensor, Tensor> our_sdpa_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
    const Tensor& lse, double dropout, bool causal, const std::optional<Tensor>& mask,
    std::optional<double> scale) {
  SiteKey key = current_site(Op::sdpa_backward);
  key.op = Op::sdpa_backward;
  key.role = Role::grad_qkv;
  const Attention problem = attention_of(q, k, v, causal, mask, scale);
  if (left_to_torch(problem, dropout, key) != nullptr) {
    return at::cpu::_scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, dropout, causal, mask, scale);
  }
  return checked_attention(key, problem, [&](const auto& checks, auto& report) {
    return attention_backward(problem, grad, out, lse, checks, report);
  });
}

// A torch whose kernels take other arguments than these keeps its own, and the report names them.
template <typename... Args>
std::tuple<Tensor, Tensor> sdpa(Args... args) {
  if constexpr (std::is_invocable_v<decltype(&our_sdpa), Args...>) {
    if (intercepting()) return our_sdpa(args...);
  } else {
    note_uncovered(Op::sdpa);
  }
  return at::cpu::_scaled_dot_product_flash_attention_for_cpu(args...);
}
template <typename... Args>
std::tuple<Tensor, Tensor, Tensor> sdpa_backward(Args... args) {
  if constexpr (std::is_invocable_v<decltype(&our_sdpa_backward), Args...>) {
    if (intercepting()) return our_sdpa_backward(args...);
  } else {
    note_uncovered(Op::sdpa_backward);
  }
  return at::cpu::_scaled_dot_product_flash_attention_for_cpu_backward(args...);
}

// The signatures of the fused-attention kernels differ between torch versions: taken from torch.
template <typename R, typename... Args>
constexpr auto sdpa_kernel(R (*)(Args...)) { return &sdpa<Args...>; }
template <typename R, typename... Args>
constexpr auto sdpa_backward_kernel(R (*)(Args...)) { return &sdpa_backward<Args...>; }

class Quiet : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

}  // namespace

bool intercepting() {
  return (verifying() || armed.load(std::memory_order_relaxed)) && thread_bypass == 0;
}

void note_uncovered(Op op) {
  if (intercepting()) count_unverified(current_site(op), "no checksum for this op yet");
}

void set_handlers(SuspectHandler suspect, DamageHandler damage) {
  const std::lock_guard<std::mutex> lock(shared.mutex);
  shared.suspect_handler = std::move(suspect);
  shared.damage_handler = std::move(damage);
}

void set_attention_handler(AttentionHandler handler) {
  const std::lock_guard<std::mutex> lock(shared.mutex);
  shared.attention_handler = std::move(handler);
}

void arm(SiteHook hook) {
  const bool on = static_cast<bool>(hook);
  const std::lock_guard<std::mutex> lock(shared.mutex);
  shared.site_hook = on ? std::make_shared<SiteHook>(std::move(hook)) : nullptr;
  armed.store(on);
}

void change_process_depth(int delta) { process_depth.fetch_add(delta); }
void change_thread_depth(int delta) { thread_depth += delta; }
void change_thread_bypass(int delta) { thread_bypass += delta; }

Bypass::Bypass() { ++thread_bypass; }
Bypass::~Bypass() { --thread_bypass; }

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
    library.impl("addmv", TORCH_FN(addmv));
    library.impl("addmv.out", TORCH_FN(addmv_out));
    library.impl("addmv_", TORCH_FN(addmv_inplace));
    library.impl("dot", TORCH_FN(dot));
    library.impl("_addmm_activation", TORCH_FN(addmm_activation));
    library.impl(
        "_scaled_dot_product_flash_attention_for_cpu",
        sdpa_kernel(&at::cpu::_scaled_dot_product_flash_attention_for_cpu));
    library.impl(
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        sdpa_backward_kernel(&at::cpu::_scaled_dot_product_flash_attention_for_cpu_backward));
    list_products();
  });
}

}  // namespace holdfast
