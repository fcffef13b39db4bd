#include "gemm/linear_reuse.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>

#include <utility>

namespace holdfast {

namespace {

uint32_t version_or_zero(const at::Tensor& t) {
  const auto& counter = t.unsafeGetTensorImpl()->version_counter();
  return counter.enabled() ? counter.current_version() : 0;
}

bool plain_matrix(const at::Tensor& t) { return t.dim() == 2 && t.is_contiguous(); }

// The sums of dY's columns, or of its rows, which this thread's next product may read transposed.
struct SumsOfGradient {
  const void* data = nullptr;
  uint32_t version = 0;
  bool of_rows = false;
  at::Tensor weights, sums, walks;

  // Returns true if these are what predicts A B.
  bool predict(const at::Tensor& a, const Encoding& of_b) const {
    return weights.defined() && weights.is_same(of_b.row_sum) && a.const_data_ptr() == data &&
        version_or_zero(a) == version && sums.size(0) == a.size(0) &&
        plain_matrix(of_rows ? a : a.t());
  }
};
thread_local SumsOfGradient latest;

// Returns true for Y = X Wᵀ, whose backward product dYᵀ X needs an encoding of X. Torch multiplies
// in this order if the right operand is a transposed matrix.
bool forward_of_linear(const Problem& p) {
  return at::GradMode::is_enabled() && torch::autograd::get_current_node() == nullptr &&
      plain_matrix(p.a) && p.b.dim() == 2 && p.b.requires_grad() && p.b.stride(0) == 1;
}

}  // namespace

Sharing sharing_for(const Problem& p, const KnownEncoding& known, Role role, bool sums_columns) {
  Sharing sharing;
  const SumsOfGradient sums = std::exchange(latest, {});
  if (role == Role::forward) {
    sharing.encode_a = forward_of_linear(p);
  } else if (p.a.dim() == 2 && sums.predict(p.a, known.encoding)) {
    sharing.dots = sums.sums;
    sharing.walks = sums.walks;
  } else if (role == Role::grad_a && plain_matrix(p.a) && sums_columns) {
    const auto x = activation_beside();
    if (x && x->row_sum.size(1) == p.a.size(0)) sharing.across = x;
  } else if (role == Role::grad_b && known.of_weight && p.a.dim() == 2 && plain_matrix(p.a.t())) {
    if (known.of_weight->row_sum.size(1) == p.a.size(0)) sharing.across = known.of_weight;
  }
  return sharing;
}

void share(const Problem& p, const Sharing& sharing, bool with_weight) {
  if (sharing.of_a.row_sum.defined()) {
    const bool needed = with_weight && p.a.requires_grad();
    keep_activation(p.a, sharing.of_a, needed ? kept_of_transpose(p.b) : std::nullopt);
  }
  if (sharing.column_sums.defined()) {
    latest = {p.a.const_data_ptr(),    version_or_zero(p.a), !plain_matrix(p.a),
              sharing.across->row_sum, sharing.column_sums,  sharing.column_walks};
  }
}

}  // namespace holdfast
