// The Python bindings of int8_gemm/.
#include "int8_gemm/int8_gemm.h"

#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace holdfast {

void bind_int8_gemm(py::module_& m) {
  m.def("int8_available", &int8_available);
  m.def("int8_saturates", &int8_saturates);
  using release = py::call_guard<py::gil_scoped_release>;
  py::class_<Int8Scales>(m, "Int8Scales")
      .def_readonly("shift", &Int8Scales::shift)
      .def_readonly("scale", &Int8Scales::scale)
      .def_readonly("addend", &Int8Scales::addend)
      .def_readonly("zero_point", &Int8Scales::out_zero_point);
  py::class_<Int8Gemm>(m, "Int8Gemm")
      .def(
          py::init([](const at::Tensor& b, int64_t columns, bool modular, const at::Tensor& digits,
                      const at::Tensor& ones, const at::Tensor& column_sums,
                      const at::Tensor& b_scale, const std::optional<at::Tensor>& b_zero_point,
                      const at::Tensor& bias, bool relu) {
            return std::make_unique<Int8Gemm>(
                b,
                Int8Settings{
                    columns, modular, digits, ones, column_sums, b_scale, b_zero_point, bias,
                    relu});
          }))
      .def("scales", &Int8Gemm::scales)
      .def("multiply", &Int8Gemm::multiply, release())
      .def("accumulate", &Int8Gemm::accumulate, release())
      .def("finish", &Int8Gemm::finish, release())
      .def("multiply_unprotected", &Int8Gemm::multiply_unprotected, release())
      .def("unpack", [](const Int8Gemm& self) { return self.packed().unpack(); })
      .def("column", [](const Int8Gemm& self, int64_t j) { return self.packed().column(j); })
      .def(
          "address",
          [](const Int8Gemm& self, int64_t k, int64_t j) { return self.packed().address(k, j); })
      .def_property_readonly("buffer", [](const Int8Gemm& self) { return self.packed().buffer(); });
}

}  // namespace holdfast
