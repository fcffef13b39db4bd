// The Python bindings of embedding_bag/.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>

#include <tuple>
#include <utility>
#include <vector>

#include "embedding_bag/batch.h"

namespace py = pybind11;

namespace holdfast {

namespace {

RowTable table_of(const at::Tensor& data, int64_t dim, int64_t kind) {
  TORCH_CHECK_VALUE(kind >= 0 && kind <= 4, "no row kind ", kind);
  TORCH_CHECK_VALUE(dim >= 1 && dim <= kMaxDim, "dim = ", dim, " must be between 1 and ", kMaxDim);
  const auto row_kind = static_cast<RowKind>(kind);
  const RowLayout layout = layout_of(row_kind, dim);
  TORCH_CHECK_TYPE(data.scalar_type() == at::kByte, "a table is uint8, got ", data.scalar_type());
  TORCH_CHECK_VALUE(
      data.device().is_cpu() && data.dim() == 2 && data.is_contiguous() &&
          data.size(1) >= layout.payload(),
      "a table of dimension ", dim, " is a contiguous CPU matrix with rows of ", layout.stride(),
      " bytes, got ", data.sizes(), " on ", data.device());
  return {
      data.data_ptr<uint8_t>(), data.size(0), dim, data.size(1), row_kind, layout, signs_of(dim)};
}

RowTable checked_table_of(const at::Tensor& data, int64_t dim, int64_t kind) {
  const RowTable table = table_of(data, dim, kind);
  TORCH_CHECK_VALUE(
      table.stride == table.layout.stride(), "rows of ", table.stride,
      " bytes carry no checksums: a row with them has ", table.layout.stride());
  return table;
}

// The output, the suspect bags, and how many bags a second computation cleared.
using Result = std::tuple<at::Tensor, std::vector<int64_t>, int64_t>;

Result result_of(Pooled pooled) {
  return {std::move(pooled.output), std::move(pooled.suspects), pooled.dismissed};
}

// The arguments of one call, as Python's _operands lists them: table, its dim and kind; indices,
// offsets and weights; whether the last offset is included; the padding index; whether to take the
// mean, to round to fp16 and to prefetch.
using Call = std::tuple<
    at::Tensor, int64_t, int64_t, at::Tensor, std::optional<at::Tensor>, std::optional<at::Tensor>,
    bool, int64_t, bool, bool, bool>;

bool rounds_to_half(const Call& call) { return std::get<9>(call); }

Batch batch_of(const Call& call, bool check) {
  const auto& [data, dim, kind, indices, offsets, weights, last, padding, mean, half, ahead] = call;
  const RowTable table = check ? checked_table_of(data, dim, kind) : table_of(data, dim, kind);
  return batch_of(table, indices, offsets, weights, last, padding, mean, check, ahead);
}

// FBGEMM's kernel alone, without any check.
at::Tensor pooled_by_fbgemm(const Batch& batch) {
  const int64_t dim = batch.table.dim;
  const at::Tensor output = at::empty({batch.bags(), dim}, at::kFloat);
  const FbgemmPool pool = fbgemm_pool(batch.table, batch.pooling);
  at::parallel_for(0, batch.bags(), grain(batch), [&](int64_t from, int64_t to) {
    const int64_t* bounds = &batch.bounds[from];
    const int64_t indices = batch.bounds[to] - batch.bounds[from];
    const bool valid = pool(bounds, to - from, indices, output.data_ptr<float>() + from * dim);
    TORCH_CHECK_INDEX(valid, "an index is outside the table's ", batch.table.rows, " rows");
  });
  return output;
}

Result forward(const Call& call, bool check, int64_t kernel, const py::object& site) {
  const Batch batch = batch_of(call, check);
  const bool half = rounds_to_half(call);
  const auto which = static_cast<Kernel>(kernel);
  TORCH_CHECK_VALUE(kernel >= 0 && kernel <= 3, "no kernel ", kernel);
  TORCH_CHECK_VALUE(
      which != Kernel::fbgemm || served_by_fbgemm(batch, half),
      "FBGEMM's kernel is for quantised tables, fp32 output and no padding index");
  Site hook;
  if (!site.is_none()) {
    hook = [&](const at::Tensor& pooled) {
      py::gil_scoped_acquire gil;
      site(pooled);
    };
  }
  py::gil_scoped_release released;
  if (which == Kernel::fbgemm) return {pooled_by_fbgemm(batch), {}, 0};
  return result_of(run(batch, which, half, hook));
}

// The bags of many tables. Each thread takes whole tables.
std::vector<Result> forward_all(const std::vector<Call>& calls, bool check) {
  std::vector<Batch> batches;
  batches.reserve(calls.size());
  for (const Call& call : calls) batches.push_back(batch_of(call, check));
  py::gil_scoped_release released;
  std::vector<Result> results(calls.size());
  at::parallel_for(0, static_cast<int64_t>(calls.size()), 1, [&](int64_t from, int64_t to) {
    for (auto i = static_cast<size_t>(from); i < static_cast<size_t>(to); ++i) {
      results[i] = result_of(run(batches[i], Kernel::best, rounds_to_half(calls[i]), {}));
    }
  });
  return results;
}

// Calls visit(table, row) for each of `count` rows from `first`, without the GIL.
template <typename Visit>
void for_rows(
    const at::Tensor& data, int64_t dim, int64_t kind, int64_t first, int64_t count, int64_t grain,
    const Visit& visit) {
  const RowTable table = checked_table_of(data, dim, kind);
  TORCH_CHECK_INDEX(
      first >= 0 && count >= 0 && first + count <= table.rows, "rows ", first, " to ",
      first + count, " are outside the table's ", table.rows);
  py::gil_scoped_release released;
  at::parallel_for(first, first + count, grain, [&](int64_t from, int64_t to) {
    for (int64_t row = from; row < to; ++row) visit(table, row);
  });
}

void encode_rows_of_table(
    const at::Tensor& data, int64_t dim, int64_t kind, int64_t first, int64_t count) {
  for_rows(data, dim, kind, first, count, 1024, encode_row);
}

std::vector<int64_t> rotten_rows(
    const at::Tensor& data, int64_t dim, int64_t kind, int64_t first, int64_t count) {
  std::vector<int64_t> rotten;
  const int64_t in_one_thread = count;
  for_rows(data, dim, kind, first, count, in_one_thread, [&](const RowTable& table, int64_t row) {
    if (!intact(table, row)) rotten.push_back(row);
  });
  return rotten;
}

// Returns the numbers of the bits that were flipped back.
std::vector<int64_t> correct_row(const at::Tensor& data, int64_t dim, int64_t kind, int64_t row) {
  const RowTable table = checked_table_of(data, dim, kind);
  TORCH_CHECK_INDEX(row >= 0 && row < table.rows, "row ", row, " is outside ", table.rows);
  const Flips flips = correct_byte(table, row);
  std::vector<int64_t> bits;
  for (int bit = 0; bit < 8; ++bit) {
    if (flips.bits >> bit & 1) bits.push_back(8 * flips.byte + bit);
  }
  return bits;
}

}  // namespace

void bind_embedding_bag(py::module_& m) {
  m.def("embedding_bag", &forward);
  m.def("embedding_bags", &forward_all);
  m.def("embedding_rows_encode", &encode_rows_of_table);
  m.def("embedding_rows_rotten", &rotten_rows);
  m.def("embedding_row_correct", &correct_row);
  m.def("embedding_fbgemm", &fbgemm_available);
  m.def("embedding_signs", [](int64_t dim) {
    const float* signs = signs_of(dim).values;
    return std::vector<float>(signs, signs + dim);
  });
}

}  // namespace holdfast
