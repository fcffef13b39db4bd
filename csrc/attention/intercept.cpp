// The interception of fused attention, which replaces torch's kernel by ours.
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward_cpu_dispatch.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_cpu_dispatch.h>
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

std::tuple<Tensor, Tensor> our_sdpa(
    const Tensor& q, const Tensor& k, const Tensor& v, double dropout, bool causal,
    const std::optional<Tensor>& mask, std::optional<double> scale) {
  const SiteKey key = current_site(Op::sdpa);
  const Attention problem = attention_of(q, k, v, causal, mask, scale);
  if (left_to_torch(problem, dropout, key) != nullptr) {
    return at::cpu::_scaled_dot_product_flash_attention_for_cpu(
        q, k, v, dropout, causal, mask, scale);
  }
  return checked_attention(key, problem, [&](const auto& checks, auto& found) {
    return attention_forward(problem, checks, found);
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
  return checked_attention(key, problem, [&](const auto& checks, auto& found) {
    return attention_backward(problem, grad, out, lse, checks, found);
  });
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

void intercept_attention(torch::Library& library) {
  replace<&our_sdpa, &at::cpu::_scaled_dot_product_flash_attention_for_cpu, Op::sdpa>(
      library, "_scaled_dot_product_flash_attention_for_cpu");
  replace<
      &our_sdpa_backward, &at::cpu::_scaled_dot_product_flash_attention_for_cpu_backward,
      Op::sdpa_backward>(library, "_scaled_dot_product_flash_attention_for_cpu_backward");
}

}  // namespace holdfast
