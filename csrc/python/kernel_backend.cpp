// The Python face of the kernel backend: its loader of variants, and what tests see of it.
#include "device/kernel_backend.h"

#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <optional>
#include <string>

#include "device/kernel_launch.h"
#include "device/kernel_plan.h"

namespace py = pybind11;

namespace holdfast {

namespace {

using Pair = std::pair<at::Tensor, at::Tensor>;

py::object torch_dtype(c10::ScalarType type) {
  return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(torch::getTHPDtype(type)));
}

// Calls a Python function with the fields of a key, as `abft.gemm.ahead_of_time.load` takes them.
// It is never released, as the interpreter may have ended by then.
void set_loader(const py::function& function) {
  auto* kept = new py::function(function);
  device::set_variant_loader([kept](const device::VariantKey& key) {
    const py::gil_scoped_acquire gil;
    py::dict variant;
    variant["c_layout"] = static_cast<int>(key.c_layout);
    variant["d_layout"] = static_cast<int>(key.d_layout);
    variant["a_layout"] = static_cast<int>(key.a_layout);
    variant["c_rows"] = key.tiles[0], variant["c_columns"] = key.tiles[1];
    variant["a_rows"] = key.tiles[2], variant["a_columns"] = key.tiles[3];
    variant["addend"] = key.addend, variant["predict"] = key.predict;
    variant["encode"] = key.encode, variant["across"] = key.across;
    variant["turned"] = key.turned;
    variant["scaled"] = key.scaled, variant["groups"] = static_cast<int>(key.groups);
    const auto dtypes = py::make_tuple(
        torch_dtype(key.c), torch_dtype(key.d), torch_dtype(key.a), torch_dtype(key.sums));
    const auto aligned = py::make_tuple(key.c_aligned, key.d_aligned, key.a_aligned);
    const auto loaded = (*kept)(static_cast<int>(key.device), variant, dtypes, aligned)
                            .cast<std::tuple<uintptr_t, unsigned, unsigned>>();
    const auto [function, shared, threads] = loaded;
    return device::LoadedVariant{reinterpret_cast<void*>(function), shared, threads};
  });
}

// A driver that hands launches to a Python function, or to nobody.
py::function* recorder = nullptr;
bool pretend_capture = false;

int recorded_launch(
    void* function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned, unsigned,
    unsigned shared, void* stream, void** parameters, void**) {
  if (recorder == nullptr) return 0;
  const py::gil_scoped_acquire gil;
  py::list values;
  for (void** p = parameters; *p != nullptr; ++p) {
    uint64_t bits;
    std::memcpy(&bits, *p, sizeof bits);
    values.append(bits);
  }
  (*recorder)(
      reinterpret_cast<uintptr_t>(function), py::make_tuple(x, y, z), threads, shared, values);
  return 0;
}

int recorded_capture(void*, int* status) {
  *status = pretend_capture ? 1 : 0;
  return 0;
}

const device::Driver kRecording{&recorded_launch, &recorded_capture};

void record_launches(const std::optional<py::function>& function, bool capturing) {
  delete recorder;
  recorder = function ? new py::function(*function) : nullptr;
  pretend_capture = capturing;
  device::replace_driver(function ? &kRecording : nullptr);
}

device::Layout layout_named(const std::string& name) {
  if (name == "columns") return device::Layout::columns;
  return name == "rows" ? device::Layout::rows : device::Layout::neither;
}

py::dict kernel_plan(
    int64_t batch, int64_t rows, int64_t columns, int64_t inner, int64_t c_bytes, int64_t a_bytes,
    const std::string& c_layout, const std::string& a_layout, const std::string& addend,
    bool encode, bool across) {
  device::Work work{batch,
                    rows,
                    columns,
                    inner,
                    {layout_named(c_layout), c_bytes},
                    {layout_named(a_layout), a_bytes}};
  work.addend = !addend.empty(), work.encode = encode, work.across = across;
  work.sum_bytes = std::max(c_bytes, a_bytes) < 4 ? 4 : 8;
  const auto plan = device::Plan::of(work);
  py::dict shown;
  shown["programs"] = plan.programs() * batch;
  shown["parts"] = py::make_tuple(plan.c.parts, plan.a.parts);
  shown["steps"] = py::make_tuple(plan.c.steps, plan.a.steps);
  shown["tiles"] =
      py::make_tuple(plan.c.tile_rows, plan.c.tile_columns, plan.a.tile_rows, plan.a.tile_columns);
  shown["bytes"] = device::bytes_moved(work, plan, addend == "row");
  return shown;
}

struct Request {
  Encoding encoding;
  Problem problem;
  device::Tolerance tolerance;
  Sharing sharing;
};

Request request_of(
    const at::Tensor& a, const Pair& encoding, const std::optional<at::Tensor>& addend, double beta,
    double alpha, const std::array<double, 5>& tolerance, bool encode_a,
    const std::optional<Pair>& across, const std::optional<Pair>& known,
    const std::optional<at::Tensor>& row_scale = {}, const std::optional<at::Tensor>& ends = {}) {
  Request request;
  request.encoding = {encoding.first, encoding.second};
  request.problem = {addend, a, {}, beta, alpha};
  request.problem.row_scale = row_scale.value_or(at::Tensor());
  request.problem.ends = ends.value_or(at::Tensor());
  const auto [scale, output, walk, drift, floor] = tolerance;
  request.tolerance = {scale, output, walk, drift, floor};
  request.sharing.encode_a = encode_a;
  if (across) request.sharing.across = Encoding{across->first, across->second};
  if (known) request.sharing.dots = known->first, request.sharing.walks = known->second;
  return request;
}

// Returns the encoding of a and its column sums, as far as they were asked for.
template <typename... More>
std::pair<std::optional<Pair>, std::optional<Pair>> kernel_judge(
    const at::Tensor& c, const at::Tensor& slot, const More&... more) {
  Request r = request_of(more...);
  device::kernel_backend().judge({c, r.problem, r.encoding, r.tolerance, slot}, r.sharing);
  const Sharing& s = r.sharing;
  std::pair<std::optional<Pair>, std::optional<Pair>> found;
  if (s.of_a.row_sum.defined()) found.first = Pair{s.of_a.row_sum, s.of_a.statistics};
  if (s.column_sums.defined()) found.second = Pair{s.column_sums, s.column_walks};
  return found;
}

// Returns the least host time of a call of `judge` in nanoseconds, with a driver that does nothing.
int64_t judge_host_ns(
    const at::Tensor& c, const at::Tensor& slot, const at::Tensor& a, const Pair& encoding,
    const std::array<double, 5>& tolerance, bool encode_a, int64_t repeats) {
  Request r = request_of(a, encoding, {}, 1, 1, tolerance, encode_a, {}, {});
  delete std::exchange(recorder, nullptr);
  device::replace_driver(&kRecording);
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int64_t i = 0; i < repeats; ++i) {
    const auto begun = std::chrono::steady_clock::now();
    device::kernel_backend().judge({c, r.problem, r.encoding, r.tolerance, slot}, r.sharing);
    const auto took = std::chrono::steady_clock::now() - begun;
    least = std::min<int64_t>(
        least, std::chrono::duration_cast<std::chrono::nanoseconds>(took).count());
  }
  device::replace_driver(nullptr);
  return least;
}

}  // namespace

void bind_kernels(py::module_& m) {
  m.def("set_kernel_loader", &set_loader);
  m.def("prepare_kernels", &device::prepare_kernels);
  m.def("record_launches", &record_launches, py::arg("function"), py::arg("capturing") = false);
  m.def(
      "kernel_plan", &kernel_plan, py::arg("batch"), py::arg("rows"), py::arg("columns"),
      py::arg("inner"), py::arg("c_bytes"), py::arg("a_bytes"), py::arg("c_layout") = "rows",
      py::arg("a_layout") = "rows", py::arg("addend") = "", py::arg("encode") = false,
      py::arg("across") = false);
  m.def(
      "kernel_encode",
      [](const at::Tensor& b, const std::optional<at::Tensor>& column_scale) {
        const auto scale = column_scale.value_or(at::Tensor());
        const Encoding made = device::kernel_backend().encode(b, scale);
        return Pair{made.row_sum, made.statistics};
      },
      py::arg("b"), py::arg("column_scale") = py::none());
  m.def("kernel_encode_both", [](const at::Tensor& b) {
    const auto [own, other] = device::kernel_backend().encode_both(b);
    std::vector<Pair> all;
    for (const Encoding& each : {own.encoding, own.copy, other.encoding, other.copy}) {
      all.emplace_back(each.row_sum, each.statistics);
    }
    return all;
  });
  m.def(
      "kernel_judge",
      &kernel_judge<
          at::Tensor, Pair, std::optional<at::Tensor>, double, double, std::array<double, 5>, bool,
          std::optional<Pair>, std::optional<Pair>, std::optional<at::Tensor>,
          std::optional<at::Tensor>>,
      py::arg("c"), py::arg("slot"), py::arg("a"), py::arg("encoding"), py::arg("addend"),
      py::arg("beta"), py::arg("alpha"), py::arg("tolerance"), py::arg("encode_a") = false,
      py::arg("across") = py::none(), py::arg("known") = py::none(),
      py::arg("row_scale") = py::none(), py::arg("ends") = py::none());
  m.def("judge_host_ns", &judge_host_ns);
}

}  // namespace holdfast
