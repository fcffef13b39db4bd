// The Python module holdfast._digest. The GIL is released while bytes are read.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <string>

#include "digest/digest.h"

namespace py = pybind11;

namespace holdfast::digest {
namespace {

py::ssize_t contiguous(const py::buffer_info& view, const char* what) {
  py::ssize_t nbytes = view.itemsize;
  for (auto axis = view.ndim; axis-- > 0;) {
    if (view.shape[axis] > 1 && view.strides[axis] != nbytes) {
      throw py::value_error(std::string(what) + " must be contiguous in C order");
    }
    nbytes *= view.shape[axis];
  }
  return nbytes;
}

void put(const Sums& found, char* bytes) {
  for (int i = 0; i < 8; ++i) {
    bytes[i] = static_cast<char>(found.first >> (8 * i));
    bytes[8 + i] = static_cast<char>(found.second >> (8 * i));
  }
}

void update(Hasher& hasher, const py::buffer& data) {
  const py::buffer_info view = data.request();
  const auto nbytes = contiguous(view, "data");
  py::gil_scoped_release released;
  hasher.update(static_cast<const uint8_t*>(view.ptr), nbytes);
}

void copy(Hasher& hasher, const py::buffer& source, const py::buffer& target) {
  const py::buffer_info from = source.request(), to = target.request(/*writable=*/true);
  const auto nbytes = contiguous(from, "source");
  if (contiguous(to, "target") != nbytes) {
    throw py::value_error(
        "source has " + std::to_string(nbytes) + " bytes, target has " +
        std::to_string(to.size * to.itemsize));
  }
  py::gil_scoped_release released;
  hasher.update(static_cast<const uint8_t*>(from.ptr), nbytes, static_cast<uint8_t*>(to.ptr));
}

// Each row is a source address, a target address and a number of bytes. The caller keeps the memory
// alive.
py::bytes copy_each(const py::buffer& rows) {
  const py::buffer_info view = rows.request();
  if (view.itemsize != 8 || view.ndim != 2 || view.shape[1] != 3) {
    throw py::value_error("rows must be int64 [n, 3]");
  }
  contiguous(view, "rows");
  const auto* row = static_cast<const int64_t*>(view.ptr);
  std::string digests(16 * view.shape[0], 0);
  py::gil_scoped_release released;
  for (py::ssize_t i = 0; i < view.shape[0]; ++i, row += 3) {
    Hasher hasher;
    hasher.update(
        reinterpret_cast<const uint8_t*>(row[0]), row[2], reinterpret_cast<uint8_t*>(row[1]));
    put(hasher.finish(), &digests[16 * i]);
  }
  py::gil_scoped_acquire held;
  return digests;
}

// Sums each block of elements and, if wanted, digests all of them: each is read from memory once.
// `out` gets the signed sums of all blocks, and then their sums of squares.
py::bytes signed_sums(
    int64_t source, int64_t elements, int64_t type, int64_t block, int64_t signs, int64_t out,
    bool digested) {
  if (type < 0 || type > 3 || static_cast<Element>(type) == Element::f16 || block < 1) {
    throw py::value_error("elements must be float64, float32 or bfloat16, and blocks not empty");
  }
  const Element of = static_cast<Element>(type);
  const int64_t size = of == Element::f64 ? 8 : of == Element::f32 ? 4 : 2;
  const int64_t blocks = (elements + block - 1) / block;
  const auto* from = reinterpret_cast<const uint8_t*>(source);
  auto* sums = reinterpret_cast<double*>(out);
  Hasher hasher;
  {
    py::gil_scoped_release released;
    const Sum sum = kernels().front()->sum;
    for (int64_t i = 0; i < blocks; ++i) {
      const int64_t count = std::min(block, elements - i * block);
      const uint8_t* here = from + i * block * size;
      sum(here, count, of, reinterpret_cast<const double*>(signs), sums + i, sums + blocks + i);
      if (digested) hasher.update(here, count * size);
    }
  }
  char bytes[16];
  put(hasher.finish(), bytes);
  return digested ? py::bytes(bytes, sizeof bytes) : py::bytes();
}

Hasher chosen(const std::string& name) {
  for (const Kernels* each : kernels()) {
    if (each->name == name) return Hasher(*each);
  }
  throw py::value_error("no kernels " + name + " on this processor: see kernels()");
}

py::bytes digest(const Hasher& hasher) {
  char bytes[16];
  put(hasher.finish(), bytes);
  return {bytes, sizeof bytes};
}

}  // namespace
}  // namespace holdfast::digest

PYBIND11_MODULE(_digest, module) {
  using namespace holdfast::digest;
  py::class_<Hasher>(
      module, "Hasher",
      "Digests bytes that are given in order, in pieces of any length. One thread may use it.")
      .def(py::init<>())
      .def(
          py::init(&chosen), py::arg("kernels"), "Use the named instruction set, one of kernels().")
      .def("update", update, py::arg("data"), "Take in a contiguous buffer.")
      .def(
          "copy", copy, py::arg("source"), py::arg("target"),
          "Take in a contiguous buffer, and copy it to another of the same size in the same pass.")
      .def("digest", digest, "Return the digest of all bytes so far, 16 bytes.");
  module.def(
      "copy_each", copy_each, py::arg("rows"),
      "Copy between addresses, given as int64 rows of source, target and number of bytes, and "
      "return "
      "the digests one after the other. Nothing is checked: the caller owns the memory.");
  module.def(
      "signed_sums", signed_sums, py::arg("source"), py::arg("elements"), py::arg("type"),
      py::arg("block"), py::arg("signs"), py::arg("out"), py::arg("digested"),
      "Sum blocks of elements (by address; float64, float32, bfloat16: 0, 1, 3) with signs, and "
      "their squares, into float64 [2, blocks]; return the digest, 16 bytes, or nothing. Nothing "
      "is checked: the caller owns the memory.");
  module.def(
      "kernels",
      [] {
        py::list names;
        for (const Kernels* each : kernels()) names.append(each->name);
        return names;
      },
      "Return the instruction sets that this processor has, the one in use first.");
}
