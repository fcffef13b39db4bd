// The interception of fused attention, which replaces torch's kernel by ours.
#include <ATen/Context.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward_cpu_dispatch.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_cpu_dispatch.h>
#include <ATen/ops/scaled_dot_product_attention_native.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <cmath>
#include <type_traits>

#include "attention/attention.h"
#include "core/callbacks.h"
#include "core/laps.h"
#include "gemm/encode.h"

namespace holdfast {

namespace {

using at::Tensor;
using Results = std::tuple<Tensor, Tensor>;
using Gradients = std::tuple<Tensor, Tensor, Tensor>;

Attention attention_of(
    const Tensor& q, const Tensor& k, const Tensor& v, bool causal,
    const std::optional<Tensor>& mask, std::optional<double> scale) {
  const double width = q.dim() == 4 ? static_cast<double>(q.size(3)) : 1;
  Attention problem{q, k, v, mask, causal, scale.value_or(1 / std::sqrt(width))};
  if (mask.has_value() && !mask->defined()) problem.mask.reset();
  return problem;
}

// Returns why a call is left to torch's kernel, and counts it; returns null if it is not left.
const char* left_to_torch(const Attention& problem, double dropout, const SiteKey& key) {
  const char* reason = dropout > 0 ? "dropout within fused attention" : unsupported(problem);
  if (reason != nullptr) count_unverified(key, reason);
  return reason;
}

// Runs our kernel with its checks and counters.
template <typename Run>
auto checked_attention(const SiteKey& key, const Attention& problem, const Run& run) {
  AttentionChecks checks;
  checks.verify = verifying();
  if (armed()) {
    checks.probe = [&](Stage stage, const Tensor& tile, const Tensor& queries, const Tensor& keys) {
      const Problem product{std::nullopt, queries, keys, 1, problem.scale};
      visit(stage, key, product, encode(keys), tile);
    };
  }
  Laps laps;
  AttentionReport found;
  auto results = run(checks, found);
  if (!checks.verify) return results;
  Durations seconds;
  seconds.encode = found.encode_s;
  seconds.product = laps.lap() - found.encode_s;
  const int64_t rows = problem.q.size(0) * problem.q.size(1) * problem.q.size(2);
  const bool sample = count_verified(key, rows, found.suspects, seconds);
  if (sample) note_line(key, found.line);
  if (!found.findings.empty()) on_attention_findings(key, found, std::get<0>(results));
  return results;
}

Results run_forward(const SiteKey& key, const Attention& problem) {
  return checked_attention(key, problem, [&](const auto& checks, auto& found) {
    return attention_forward(problem, checks, found);
  });
}

Gradients run_backward(
    const SiteKey& key, const Attention& problem, const Tensor& grad, const Tensor& out,
    const Tensor& lse) {
  return checked_attention(key, problem, [&](const auto& checks, auto& found) {
    return attention_backward(problem, grad, out, lse, checks, found);
  });
}

SiteKey backward_site() {
  SiteKey key = current_site(Op::sdpa_backward);
  key.op = Op::sdpa_backward;
  key.role = Role::grad_qkv;
  return key;
}

Results our_sdpa(
    const Tensor& q, const Tensor& k, const Tensor& v, double dropout, bool causal,
    const std::optional<Tensor>& mask, std::optional<double> scale) {
  const SiteKey key = current_site(Op::sdpa);
  const Attention problem = attention_of(q, k, v, causal, mask, scale);
  if (left_to_torch(problem, dropout, key) != nullptr) {
    return at::cpu::_scaled_dot_product_flash_attention_for_cpu(
        q, k, v, dropout, causal, mask, scale);
  }
  return run_forward(key, problem);
}

Gradients our_sdpa_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
    const Tensor& lse, double dropout, bool causal, const std::optional<Tensor>& mask,
    std::optional<double> scale) {
  const SiteKey key = backward_site();
  const Attention problem = attention_of(q, k, v, causal, mask, scale);
  if (left_to_torch(problem, dropout, key) != nullptr) {
    return at::cpu::_scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, dropout, causal, mask, scale);
  }
  return run_backward(key, problem, grad, out, lse);
}

Attention with_dropout(
    const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask,
    bool causal, double scale, const Tensor& kept, double dropout) {
  Attention problem = attention_of(q, k, v, causal, mask, scale);
  const int64_t full[] = {q.size(0), q.size(1), q.size(2), k.size(2)};
  TORCH_CHECK(unsupported(problem) == nullptr && kept.scalar_type() == at::kBool);
  TORCH_CHECK(kept.sizes() == at::IntArrayRef(full) && dropout >= 0 && dropout < 1);
  problem.kept = kept.contiguous();
  problem.dropout = dropout;
  return problem;
}

Results dropout_forward(
    const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask,
    bool causal, double scale, const Tensor& kept, double dropout) {
  const SiteKey key = current_site(Op::sdpa);
  return run_forward(key, with_dropout(q, k, v, mask, causal, scale, kept, dropout));
}

Gradients dropout_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
    const Tensor& lse, const std::optional<Tensor>& mask, bool causal, double scale,
    const Tensor& kept, double dropout) {
  const SiteKey key = backward_site();
  const Attention problem = with_dropout(q, k, v, mask, causal, scale, kept, dropout);
  return run_backward(key, problem, grad, out, lse);
}

// Calls the op of abft/attention/fused.py, which has the gradients.
Tensor differentiable(const Attention& p, const Tensor& kept, double dropout) {
  using Signature = Results(
      const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, bool, double,
      const std::optional<Tensor>&, double, bool);
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("holdfast::sdpa", "").typed<Signature>();
  return std::get<0>(op.call(p.q, p.k, p.v, p.mask, p.causal, p.scale, kept, dropout, false));
}

Tensor dropout_kept(const Tensor& q, const Tensor& k, double dropout) {
  const int64_t sizes[] = {q.size(0), q.size(1), q.size(2), k.size(2)};
  return draw_kept(sizes, dropout, q.scalar_type());
}

// Returns true if our kernel may stand in for the operators by which torch writes it out, if it
// supports the problem. As for torch's fused kernels, the user may have disabled it.
bool may_fuse(const Attention& problem, bool grouped) {
  const auto plain = [](const Tensor& t) {
    return (t.key_set() & at::kTensorSubclassLike).empty() && !t._fw_grad(0).defined();
  };
  const Tensor &q = problem.q, &k = problem.k, &v = problem.v;
  if (!at::globalContext().userEnabledFlashSDP() || !plain(q) || !plain(k) || !plain(v)) {
    return false;
  }
  const auto& mask = problem.mask;
  if (mask && (problem.causal || mask->requires_grad() || !plain(*mask))) return false;
  return q.numel() > 0 && k.numel() > 0 && q.dim() == 4 && k.dim() == 4 &&
      (grouped || q.size(1) == k.size(1));
}

// Stands above torch's choice of a kernel, as no kernel that it could choose has dropout.
Tensor sdpa_with_dropout(
    const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask,
    double dropout, bool causal, std::optional<double> scale, bool grouped) {
  if (dropout > 0 && dropout < 1) {
    Attention problem = attention_of(q, k, v, causal, mask, scale);
    if (may_fuse(problem, grouped)) {
      if (problem.mask && problem.mask->scalar_type() == at::kBool) {
        const Tensor zeros = at::zeros(problem.mask->sizes(), q.options());
        const double blocked = -std::numeric_limits<double>::infinity();
        problem.mask = zeros.masked_fill(problem.mask->logical_not(), blocked);
      }
      if (unsupported(problem) == nullptr) {
        return differentiable(problem, dropout_kept(q, k, dropout), dropout);
      }
    }
  }
  return at::native::scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale, grouped);
}

// A torch version whose kernels take other arguments keeps its kernels, and the report says so.
template <auto ours, auto theirs, Op op, typename... Args>
auto intercepted(Args... args) {
  if constexpr (std::is_invocable_v<decltype(ours), Args...>) {
    if (intercepting()) return ours(args...);
  } else {
    note_uncovered(op);
  }
  return theirs(args...);
}

// The kernels' signatures differ between torch versions and are therefore deduced from torch.
template <auto ours, auto theirs, Op op, typename R, typename... Args>
constexpr auto kernel_like(R (*)(Args...)) {
  return &intercepted<ours, theirs, op, Args...>;
}

// Registers ours in the place of one of torch's kernels.
template <auto ours, auto theirs, Op op>
void replace(torch::Library& library, const char* name) {
  library.impl(name, kernel_like<ours, theirs, op>(theirs));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(holdfast, m) {
  const std::string given = "Tensor q, Tensor k, Tensor v, ",
                    rest =
                        "Tensor? mask, bool causal, float scale, Tensor kept, float dropout) -> ";
  const std::string backward = "dropout_attention_backward(Tensor grad, " + given;
  m.def("dropout_kept(Tensor q, Tensor k, float dropout) -> Tensor");
  m.def(("dropout_attention(" + given + rest + "(Tensor, Tensor)").c_str());
  m.def((backward + "Tensor out, Tensor lse, " + rest + "(Tensor, Tensor, Tensor)").c_str());
}
TORCH_LIBRARY_IMPL(holdfast, CPU, m) {
  m.impl("dropout_kept", &dropout_kept);
  m.impl("dropout_attention", &dropout_forward);
  m.impl("dropout_attention_backward", &dropout_backward);
}

void intercept_attention(torch::Library& library) {
  static auto& above = *new torch::Library(
      torch::Library::IMPL, "aten", c10::DispatchKey::AutogradCPU, __FILE__, __LINE__);
  replace<&sdpa_with_dropout, &at::native::scaled_dot_product_attention, Op::sdpa>(
      above, "scaled_dot_product_attention");
  replace<&our_sdpa, &at::cpu::_scaled_dot_product_flash_attention_for_cpu, Op::sdpa>(
      library, "_scaled_dot_product_flash_attention_for_cpu");
  replace<
      &our_sdpa_backward, &at::cpu::_scaled_dot_product_flash_attention_for_cpu_backward,
      Op::sdpa_backward>(library, "_scaled_dot_product_flash_attention_for_cpu_backward");
}

}  // namespace holdfast
