// The Python face of the verification of products on a device.
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>

#include "device/intercept.h"
#include "device/kernel_backend.h"
#include "device/ledger.h"

namespace py = pybind11;

namespace holdfast {

namespace {

using at::Tensor;

py::tuple site_tuple(const SiteKey& key) {
  return py::make_tuple(key.module, op_name(key.op), key.ordinal, static_cast<int>(key.role));
}

device::Backend* backend_named(const std::string& name) {
  if (name == "aten") return &device::aten_backend();
  if (name == "kernels") return &device::kernel_backend();
  TORCH_CHECK_VALUE(name.empty(), "holdfast: no backend is named ", name);
  return nullptr;
}

// Returns the slot of a site for a check that Python is about to queue, which it counts.
Tensor slot(
    const Tensor& like, int64_t module, std::string_view op, int64_t ordinal, int64_t role) {
  device::note_check(like.device());
  return device::slot_of(site_key(module, op, ordinal, role), like.device());
}

py::tuple ledger(const at::Device& on) {
  const auto [values, keys] = device::ledger_of(on);
  py::list sites;
  for (const SiteKey& key : keys) sites.append(site_tuple(key));
  return py::make_tuple(values, sites);
}

device::Precision precision_named(const std::string& name) {
  if (name == "tf32") return device::Precision::tf32;
  if (name == "fast") return device::Precision::fast;
  return name == "tf32x3" ? device::Precision::tf32x3 : device::Precision::ieee;
}

py::tuple tolerance(
    const Tensor& operand, const Tensor& output, int64_t inner, int64_t columns,
    const std::string& precision) {
  const auto t = device::Tolerance::of(
      operand.scalar_type(), output.scalar_type(), inner, columns, precision_named(precision));
  const auto growth = device::DriftGrowth::of(inner);
  return py::make_tuple(
      t.scale, t.output, t.walk, t.drift, t.floor, growth.drifting, growth.repeating);
}

// The scales of rows and columns, the ends of groups, and how fp8 products are summed.
struct Rest {
  std::optional<Tensor> row_scale, column_scale, ends;
  bool fast_sums = false;
};

// Calls `use` with a product that a device computed.
template <typename Use>
auto of_product(
    device::Backend& by, const Tensor& c, const Tensor& a, const Tensor& b,
    const std::optional<Tensor>& addend, double beta, double alpha, const Rest& rest,
    const Tensor& slot, const Use& use) {
  const auto tolerance = device::Tolerance::of(
      a.scalar_type(), c.scalar_type(), a.size(-1), c.size(-1),
      rest.fast_sums ? device::Precision::fast : device::Precision::ieee);
  Problem problem{addend, a, b, beta, alpha};
  problem.row_scale = rest.row_scale.value_or(Tensor());
  problem.column_scale = rest.column_scale.value_or(Tensor());
  problem.ends = rest.ends.value_or(Tensor());
  const Encoding encoding = by.encode(b, problem.column_scale);
  return use(device::Judged{c, problem, encoding, tolerance, slot});
}

// Judges one product by a backend, as an interception does.
void judge(
    const std::string& backend, const Tensor& c, const Tensor& a, const Tensor& b,
    const std::optional<Tensor>& addend, double beta, double alpha, const Tensor& slot,
    const std::optional<Tensor>& row_scale, const std::optional<Tensor>& column_scale,
    const std::optional<Tensor>& ends, bool fast_sums) {
  const Rest rest{row_scale, column_scale, ends, fast_sums};
  device::Backend* by = backend_named(backend);
  TORCH_CHECK_VALUE(by != nullptr, "holdfast: name a backend");
  of_product(*by, c, a, b, addend, beta, alpha, rest, slot, [&](const device::Judged& judged) {
    Sharing sharing;
    by->judge(judged, sharing);
  });
}

Tensor thresholds(
    const Tensor& c, const Tensor& a, const Tensor& b, const std::optional<Tensor>& addend,
    double beta, double alpha, const std::optional<Tensor>& row_scale,
    const std::optional<Tensor>& column_scale, const std::optional<Tensor>& ends) {
  return of_product(
      device::aten_backend(), c, a, b, addend, beta, alpha, {row_scale, column_scale, ends, false},
      {}, &device::row_thresholds);
}

}  // namespace

void bind_device(py::module_& m) {
  m.def(
      "intercept_device",
      [](const std::string& key, const std::string& backend, const std::string& reason) {
        device::intercept(key, backend_named(backend), reason);
      },
      py::arg("key"), py::arg("backend"), py::arg("reason") = "");
  m.def("release_device", &device::release, py::arg("key"));
  m.def("intercepts_device", [](const at::Device& on) { return device::intercepts(on.type()); });
  m.def("prepare_ledger", &device::prepare_ledger);
  m.def(
      "ledger_slot", &slot, py::arg("like"), py::arg("module"), py::arg("op"), py::arg("ordinal"),
      py::arg("role"));
  m.def("ledger", &ledger);
  m.def("ledger_devices", &device::ledger_devices);
  m.def("note_suspect", [](int64_t module, std::string_view op, int64_t ordinal, int64_t role) {
    note_suspect(site_key(module, op, ordinal, role));
  });
  m.def("checks_queued", &device::checks_queued);
  m.def("device_tolerance", &tolerance);
  m.def(
      "device_judge", &judge, py::arg("backend"), py::arg("c"), py::arg("a"), py::arg("b"),
      py::arg("addend"), py::arg("beta"), py::arg("alpha"), py::arg("slot"),
      py::arg("row_scale") = py::none(), py::arg("column_scale") = py::none(),
      py::arg("ends") = py::none(), py::arg("fast_sums") = false);
  m.def(
      "device_thresholds", &thresholds, py::arg("c"), py::arg("a"), py::arg("b"), py::arg("addend"),
      py::arg("beta"), py::arg("alpha"), py::arg("row_scale") = py::none(),
      py::arg("column_scale") = py::none(), py::arg("ends") = py::none());
}

}  // namespace holdfast
