#include "gemm/linear_reuse.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>

#include "gemm/encoding_cache.h"

namespace holdfast {

namespace {

// The column sums of dY, which this thread's next product may read transposed.
struct ColumnSums {
  const void* data = nullptr;
  uint32_t version = 0;
  at::Tensor weights, sums, walks;
};
thread_local ColumnSums latest;

uint32_t version_or_zero(const at::Tensor& t) {
  const auto& counter = t.unsafeGetTensorImpl()->version_counter();
  return counter.enabled() ? counter.current_version() : 0;
}

bool plain_matrix(const at::Tensor& t) { return t.dim() == 2 && t.is_contiguous(); }

// Returns true for Y = X Wᵀ, whose backward product dYᵀ X needs an encoding of X. Torch multiplies
// in this order if the right operand is a transposed matrix.
bool forward_of_linear(const Problem& p) {
  return at::GradMode::is_enabled() && torch::autograd::get_current_node() == nullptr &&
      plain_matrix(p.a) && p.b.dim() == 2 && p.b.requires_grad() && p.b.stride(0) == 1;
}

}  // namespace

Sharing sharing_for(const Problem& p, const Encoding& encoding, Role role, bool sums_columns) {
  Sharing sharing;
  if (role == Role::forward) {
    sharing.encode_a = forward_of_linear(p);
  } else if (role == Role::grad_a && plain_matrix(p.a) && sums_columns) {
    const auto x = activation_beside();
    if (x && x->row_sum.size(1) == p.a.size(0)) sharing.across = x;
  } else if (role == Role::grad_b && latest.weights.defined()) {
    const bool same = p.a.dim() == 2 && p.a.const_data_ptr() == latest.data &&
        version_or_zero(p.a) == latest.version && plain_matrix(p.a.t()) &&
        latest.weights.is_same(encoding.row_sum) && latest.sums.size(0) == p.a.size(0);
    if (same) {
      sharing.dots = latest.sums;
      sharing.walks = latest.walks;
    }
    latest = {};
  }
  return sharing;
}

void share(const Problem& p, const Sharing& sharing) {
  if (sharing.of_a.row_sum.defined()) {
    keep_activation(p.a, sharing.of_a);
  }
  if (sharing.column_sums.defined()) {
    latest = {
        p.a.const_data_ptr(), version_or_zero(p.a), sharing.across->row_sum, sharing.column_sums,
        sharing.column_walks};
  }
}

}  // namespace holdfast
