// Parts of a check that interceptions share: which calls are products, and that a check which fails
// costs only itself.
#pragma once

#include <ATen/MemoryOverlap.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <exception>

#include "core/callbacks.h"

namespace holdfast {

constexpr const char* kNoThreshold = "dtype has no rounding threshold";
constexpr const char* kFailed = "its check failed";

// Returns false for empty products, which need no check, and for shapes that torch will reject.
inline bool well_formed(const Problem& p) {
  const int64_t dim = p.a.dim();
  if (p.a.numel() == 0 || p.b.numel() == 0 || dim < 2 || p.b.dim() < 2) return false;
  if (p.a.size(-1) != p.b.size(-2)) return false;
  if (p.ends.defined()) return dim == 2 && p.ends.numel() > 0;
  return dim <= 3 && p.b.dim() == dim && (dim == 2 || p.a.size(0) == p.b.size(0));
}

// Runs a kernel so that products inside it (as for fp16 without its own kernel) are not
// intercepted.
template <typename Run>
at::Tensor alone(const Run& run) {
  const Bypass bypass;
  return run();
}

// Keeps torch from warning that kernels are overridden, which is done on purpose.
class Quiet {
 public:
  Quiet() : guard_(&handler_) {}

 private:
  struct Handler : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  };
  Handler handler_;
  c10::WarningUtils::WarningHandlerGuard guard_;
};

// Returns whether a Python exception is an error, and not an interrupt or the end of the program.
inline bool is_error(const python_error& raised) {
  const pybind11::gil_scoped_acquire gil;
  return PyErr_GivenExceptionMatches(raised.type, PyExc_Exception) != 0;
}

// Runs a part of a check. Returns false if it raised an error, as it does if memory is short:
// Python decides whether the program goes on with the product unverified.
template <typename Part>
bool succeeds(const SiteKey& key, const Part& part) {
  try {
    part();
    return true;
  } catch (const python_error& error) {
    if (!is_error(error)) throw;
    on_failed_check(key, error.what());
    return false;
  } catch (const std::exception& error) {
    on_failed_check(key, error.what());
    return false;
  }
}

// Returns true if a product written to `out` can be verified; counts it as unverified if not.
inline bool verifiable(Op op, const at::Tensor& out, const at::Tensor& a, const at::Tensor& b) {
  // Torch reports "too hard" for memory with gaps even if the storages are different.
  const auto clear_of = [&](const at::Tensor& operand) {
    return !out.is_alias_of(operand) ||
        at::get_overlap_status(out, operand) == at::MemOverlapStatus::No;
  };
  const bool apart = clear_of(a) && clear_of(b);
  if (!apart) count_unverified(current_site(op), "its output overlaps an operand");
  return apart;
}

inline bool verifiable(Op op, const at::Scalar& beta, const at::Scalar& alpha) {
  const bool real = !beta.isComplex() && !alpha.isComplex();
  if (!real) count_unverified(current_site(op), kNoThreshold);
  return real;
}

}  // namespace holdfast
