// Checks the arguments of a batch, so that no index, offset or weight is read out of bounds.
#include "embedding_bag/batch.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <cstdlib>
#include <fstream>
#include <string>

namespace holdfast {

namespace {

constexpr double kMuch = 1 << 30;  // bytes; smaller requests are not compared with free memory

// Returns MemAvailable in bytes; -1 if the kernel does not report it.
double available_bytes() {
  std::ifstream lines("/proc/meminfo");
  for (std::string name, rest; lines >> name; std::getline(lines, rest)) {
    double kib;
    if (name == "MemAvailable:" && lines >> kib) return kib * 1024;
  }
  return -1;
}

void check_memory(const char* what, double bytes) {
  if (bytes < kMuch) return;
  const double available = available_bytes();
  TORCH_CHECK_VALUE(
      available < 0 || bytes <= available, what, " would take ", bytes / 1e9, " GB, and ",
      available / 1e9, " GB of memory are available: give fewer at once");
}

bool integral(const at::Tensor& t) {
  return t.scalar_type() == at::kLong || t.scalar_type() == at::kInt;
}

bool has_values(const at::Tensor& t) {
  const c10::TensorImpl& impl = *t.unsafeGetTensorImpl();
  if (t.layout() != at::kStrided || impl.is_python_dispatch() || !impl.has_storage()) return false;
  return t.numel() == 0 || t._is_zerotensor() || t.storage().data() != nullptr;
}

// Returns the values in contiguous memory; strided, lazily negated and zero tensors are copied.
at::Tensor plain(const char* name, const at::Tensor& t) {
  TORCH_CHECK_VALUE(
      t.is_cpu() || t.layout() != at::kStrided, name, " must be on the CPU, not on ", t.device());
  TORCH_CHECK_TYPE(
      !t.is_nested() && has_values(t), name, " must be a dense tensor with values, got ",
      t.toString());
  if (t.is_contiguous() && !t.is_neg() && !t._is_zerotensor()) return t;
  check_memory(name, static_cast<double>(t.numel()) * static_cast<double>(t.element_size()));
  return at::empty(t.sizes(), t.options()).copy_(t);
}

// Returns the position at which each bag begins, and the end of the last bag.
std::vector<int64_t> bounds_of(
    const at::Tensor& indices, const std::optional<at::Tensor>& offsets, bool include_last) {
  const int64_t count = indices.numel();
  std::vector<int64_t> bounds;
  if (!offsets) {
    for (int64_t bag = 0; bag <= indices.size(0); ++bag) bounds.push_back(bag * indices.size(1));
    return bounds;
  }
  const int64_t given = offsets->numel();
  TORCH_CHECK_VALUE(
      given > 0 || !include_last, "offsets are empty: with include_last_offset one is the least");
  bounds.reserve(static_cast<size_t>(given + 1));
  for (int64_t i = 0; i < given; ++i) {
    bounds.push_back(
        offsets->scalar_type() == at::kLong ? offsets->data_ptr<int64_t>()[i]
                                            : offsets->data_ptr<int32_t>()[i]);
  }
  if (!include_last) bounds.push_back(count);
  TORCH_CHECK_VALUE(
      given > 0 || count == 0, "offsets are empty: no bag has the ", count, " indices");
  TORCH_CHECK_VALUE(bounds[0] == 0, "offsets[0] = ", bounds[0], " must be 0: bags begin there");
  for (size_t i = 1; i < bounds.size(); ++i) {
    TORCH_CHECK_VALUE(
        bounds[i - 1] <= bounds[i] && bounds[i] <= count, "offsets must rise and stay within the ",
        count, " indices: ", bounds[i], " follows ", bounds[i - 1], " at position ", i);
  }
  return bounds;
}

void check_arguments(
    const at::Tensor& indices, const std::optional<at::Tensor>& offsets,
    const std::optional<at::Tensor>& weights) {
  TORCH_CHECK_TYPE(
      integral(indices), "indices must be int32 or int64, got ", indices.scalar_type());
  TORCH_CHECK_VALUE(
      indices.dim() == (offsets ? 1 : 2),
      "indices must be [count] with offsets or else [bags, count], got ", indices.sizes());
  if (offsets) {
    TORCH_CHECK_TYPE(
        integral(*offsets), "offsets must be int32 or int64, got ", offsets->scalar_type());
    TORCH_CHECK_VALUE(offsets->dim() == 1, "offsets must be a vector, got ", offsets->sizes());
  }
  if (!weights) return;
  TORCH_CHECK_TYPE(
      weights->scalar_type() == at::kFloat, "weights must be float32, got ",
      weights->scalar_type());
  TORCH_CHECK_VALUE(
      weights->sizes() == indices.sizes(), "weights must be one an index, ", indices.sizes(),
      ", got ", weights->sizes());
}

}  // namespace

Batch batch_of(
    const RowTable& table, const at::Tensor& indices, const std::optional<at::Tensor>& offsets,
    const std::optional<at::Tensor>& weights, bool include_last, int64_t padding, bool mean,
    bool check, bool prefetch) {
  const at::Tensor of_rows = plain("indices", indices);
  const std::optional<at::Tensor> of_bags =
      offsets ? std::optional<at::Tensor>(plain("offsets", *offsets)) : std::nullopt;
  const at::Tensor factors = weights ? plain("weights", *weights) : at::Tensor();
  check_arguments(of_rows, of_bags, weights);
  const double bags = static_cast<double>(of_bags ? of_bags->numel() : of_rows.size(0));
  const double of_bag = static_cast<double>(table.dim) * 6 + sizeof(Expected) + sizeof(int64_t);
  check_memory("the output", bags * of_bag);
  return {
      table,
      {of_rows.data_ptr(), of_rows.scalar_type() == at::kLong, of_rows.numel(),
       weights ? factors.data_ptr<float>() : nullptr, padding, mean, prefetch, check},
      bounds_of(of_rows, of_bags, include_last),
      of_rows,
      factors};
}

[[noreturn]] void refuse_index(const Batch& b, int64_t position) {
  TORCH_CHECK_INDEX(
      false, "index ", b.index(position), " at position ", position, " is outside the table's ",
      b.table.rows, " rows");
  std::abort();
}

}  // namespace holdfast
