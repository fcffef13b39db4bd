// The Python module holdfast._C. The passes over matrices are operators of torch's dispatcher, and
// the rest are plain functions.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "attention/attention.h"
#include "conv/intercept.h"
#include "core/callbacks.h"
#include "core/threshold.h"
#include "embedding_bag/batch.h"
#include "gemm/encode.h"
#include "gemm/encoding_cache.h"
#include "gemm/incremental_checksums.h"
#include "gemm/intercept.h"
#include "gemm/verify.h"

namespace py = pybind11;

namespace holdfast {

void bind_device(py::module_& m);
void bind_embedding_bag(py::module_& m);
void bind_int8_gemm(py::module_& m);
void bind_kernels(py::module_& m);

namespace {

void check_matrix(const at::Tensor& t, const char* what) {
  TORCH_CHECK_VALUE(
      t.dim() == 2 || t.dim() == 3, what, " must be a matrix or a batch of matrices, got ", t.dim(),
      " dimensions");
  TORCH_CHECK_TYPE(
      supported(t), what, " must be float64, float32, float16 or bfloat16, got ", t.scalar_type());
  TORCH_CHECK_VALUE(t.numel() > 0, what, " is empty");
}

std::tuple<at::Tensor, at::Tensor> encode_rows(const at::Tensor& b) {
  check_matrix(b, "b");
  auto encoding = encode(b);
  return {encoding.row_sum, encoding.statistics};
}

Problem problem_of(
    const at::Tensor& c, const at::Tensor& a, const Encoding& encoding,
    const std::optional<at::Tensor>& addend, double beta, double alpha,
    const std::optional<at::Tensor>& b) {
  check_matrix(c, "c");
  check_matrix(a, "a");
  const auto& [row_sum, statistics] = encoding;
  const int64_t batches = c.dim() == 3 ? c.size(0) : 1;
  TORCH_CHECK_TYPE(
      !addend || addend->scalar_type() == c.scalar_type(), "addend must have c's dtype, ",
      c.scalar_type(), ", got ", addend ? addend->scalar_type() : c.scalar_type());
  TORCH_CHECK_VALUE(
      row_sum.sizes() == at::IntArrayRef({batches, a.size(-1)}) &&
          statistics.sizes() == at::IntArrayRef({batches, a.size(-1) + 2}) &&
          row_sum.is_contiguous() && statistics.is_contiguous() &&
          row_sum.scalar_type() == at::kDouble && statistics.scalar_type() == at::kDouble &&
          a.size(-2) == c.size(-2) && a.dim() == c.dim(),
      "the encoding does not belong to this product: encode b again");
  TORCH_CHECK_VALUE(
      !b ||
          (b->dim() == a.dim() && b->size(-2) == a.size(-1) && b->size(-1) == c.size(-1) &&
           b->scalar_type() == a.scalar_type()),
      "b does not fit: a ", a.sizes(), " times b ", b ? b->sizes() : c.sizes(), " is not c ",
      c.sizes());
  return {addend, a, b.value_or(at::Tensor()), beta, alpha};
}

// Calls `f` with a product whose encoding fits it, and with further arguments.
template <auto f, typename... More>
auto of_product(
    const at::Tensor& c, const at::Tensor& a, const at::Tensor& row_sum,
    const at::Tensor& statistics, const std::optional<at::Tensor>& addend, double beta,
    double alpha, const std::optional<at::Tensor>& b, More... more) {
  const Encoding encoding{row_sum, statistics};
  return f(c, problem_of(c, a, encoding, addend, beta, alpha, b), encoding, more...);
}

// Counts the suspect rows; with `encode_a` also returns the encoding of a as the right operand of a
// product to come, from the same pass over a.
std::tuple<int64_t, std::optional<std::tuple<at::Tensor, at::Tensor>>> count_suspect_rows(
    const at::Tensor& c, const Problem& problem, const Encoding& encoding, bool encode_a) {
  Sharing sharing;
  sharing.encode_a = encode_a;
  const int64_t suspects = count_suspects(c, problem, encoding, sharing);
  if (!encode_a) return {suspects, std::nullopt};
  return {suspects, std::tuple(sharing.of_a.row_sum, sharing.of_a.statistics)};
}

// Returns the row sums and statistics of b, and whether they were kept of a watched weight and
// whether a kept encoding was damaged.
std::tuple<at::Tensor, at::Tensor, bool, bool> known_encoding(const at::Tensor& b) {
  check_matrix(b, "b");
  auto known = encoding_of(b, Role::forward);
  return {known.encoding.row_sum, known.encoding.statistics, known.kept, known.damaged};
}

void check_sums(const at::Tensor& sums) {
  TORCH_CHECK_VALUE(
      sums.dim() == 3 && sums.size(1) == 3 && sums.numel() > 0 && sums.is_contiguous() &&
          sums.scalar_type() == at::kDouble,
      "sums must be contiguous, float64 [batch, 3, K], got ", sums.scalar_type(), " ",
      sums.sizes());
}

void add_checked_columns(const at::Tensor& sums, const at::Tensor& b, int64_t first) {
  check_sums(sums);
  check_matrix(b, "b");
  TORCH_CHECK_VALUE(
      b.dim() == 3 && b.size(0) == sums.size(0) && b.size(1) == sums.size(2) && first >= 0, "b ",
      b.sizes(), " from column ", first, " does not belong to the sums ", sums.sizes());
  add_columns(sums, b, first);
}

std::tuple<at::Tensor, at::Tensor> encoding_of_checked_sums(
    const at::Tensor& sums, int64_t columns, const at::Tensor& like) {
  check_sums(sums);
  const Encoding encoding = encoding_of_sums(sums, columns, like.scalar_type());
  return {encoding.row_sum, encoding.statistics};
}

at::Tensor fingerprints_of(const at::Tensor& sums) {
  check_sums(sums);
  return fingerprints(sums);
}

py::tuple name_of(const SiteKey& key) {
  return py::make_tuple(key.module, op_name(key.op), key.ordinal, static_cast<int>(key.role));
}

py::tuple describe(const Problem& p, const Encoding& e) {
  return py::make_tuple(p.addend, p.a, p.b, p.beta, p.alpha, e.row_sum, e.statistics);
}

py::dict describe(const Finding& finding) {
  py::dict row;
  row["verdict"] = kVerdicts[static_cast<int>(finding.verdict)];
  row["part"] = finding.part;
  row["batch"] = finding.place.batch;
  row["head"] = finding.place.head;
  row["query_tile"] = finding.place.query_tile;
  row["key_tile"] = finding.place.key_tile;
  row["row"] = finding.row;
  row["column"] = finding.column;
  row["rows"] = finding.rows;
  row["corrupted"] = finding.corrupted;
  row["repaired"] = finding.repaired;
  return row;
}

// A Python callable that C++ threads own and call, which may not hold the GIL.
class Callable {
 public:
  explicit Callable(py::object object)
      : object_(new py::object(std::move(object)), [](py::object* owned) {
          const py::gil_scoped_acquire gil;
          delete owned;
        }) {}

  // `arguments()` makes the tuple of arguments, under the GIL. A Python exception keeps its type on
  // the way through the dispatcher and the autograd engine.
  template <typename Arguments>
  void operator()(const Arguments& arguments) const {
    const py::gil_scoped_acquire gil;
    try {
      (*object_)(*arguments());
    } catch (py::error_already_set& error) {
      error.restore();
      python_error carried;
      carried.persist();
      throw std::move(carried);
    }
  }

 private:
  std::shared_ptr<py::object> object_;
};

void set_handlers(
    py::object suspect, py::object damage, py::object failure, py::object attention,
    py::object convolution) {
  on_suspect.set([call = Callable(std::move(suspect))](const Suspicion& s) {
    call([&] {
      return py::make_tuple(
          name_of(s.key), describe(s.problem, s.encoding), s.output, s.rows, s.kept,
          py::cpp_function(s.compute));
    });
  });
  on_damaged_encoding.set([call = Callable(std::move(damage))](const SiteKey& key) {
    call([&] { return py::make_tuple(name_of(key)); });
  });
  on_failed_check.set(
      [call = Callable(std::move(failure))](const SiteKey& key, const std::string& message) {
        call([&] { return py::make_tuple(name_of(key), message); });
      });
  on_attention_findings.set(
      [call = Callable(std::move(attention))](
          const SiteKey& key, const AttentionReport& report, const at::Tensor& output) {
        call([&] {
          py::list findings;
          for (const Finding& finding : report.findings) findings.append(describe(finding));
          return py::make_tuple(name_of(key), findings, output);
        });
      });
  on_convolution.set([call = Callable(std::move(convolution))](const Convolved& c) {
    call([&] {
      const auto arguments = py::make_tuple(
          c.input, c.weight, c.bias, c.stride, c.padding, c.dilation, c.transposed,
          c.output_padding, c.groups);
      return py::make_tuple(name_of(c.key), arguments, c.gradient, c.results, c.seconds);
    });
  });
}

void set_tolerances(py::object function) {
  if (function.is_none()) return row_tolerances.set({});
  row_tolerances.set([call = Callable(std::move(function))](
                         const Problem& p, const Encoding& e, const at::Tensor& out) {
    call([&] { return py::make_tuple(describe(p, e), out); });
  });
}

void arm(py::object hook) {
  if (hook.is_none()) return site_hook.set({});
  site_hook.set([call = Callable(std::move(hook))](
                    Stage stage, const SiteKey& key, const Problem& p, const Encoding& e,
                    const at::Tensor& out) {
    call([&] {
      return py::make_tuple(
          kStages[static_cast<int>(stage)], name_of(key), describe(p, e),
          out.defined() ? py::cast(out) : py::none());
    });
  });
}

template <size_t count>
py::tuple names_of(const char* const (&names)[count]) {
  py::tuple all(count);
  for (size_t i = 0; i < count; ++i) all[i] = py::str(names[i]);
  return all;
}

// The names and constants that both C++ and Python define, in the order of the C++ enums
// (`agree` in holdfast/native.py compares them).
py::dict tables() {
  py::dict all;
  all["stages"] = names_of(kStages);
  all["roles"] = names_of(kRoles);
  all["elements"] = names_of(kElements);
  all["attention_verdicts"] = names_of(kVerdicts);
  all["row_kinds"] = names_of(kRowKinds);
  all["bag_kernels"] = names_of(kKernels);
  all["bag_sigmas"] = kSigmas;
  all["bag_most_columns"] = kMaxDim;
  return all;
}

py::list list_counters() {
  py::list rows;
  for (const SiteCounters& c : counters()) {
    py::dict row;
    row["site"] = name_of(c.key);
    row["covered"] = covered(c.key.op);
    row["calls"] = c.calls;
    row["rows"] = c.rows;
    row["suspects"] = c.suspects;
    row["unverified"] = c.unverified;
    row["encode_s"] = c.seconds.encode;
    row["product_s"] = c.seconds.product;
    row["verify_s"] = c.seconds.verify;
    row["reason"] = c.reason;
    row["line"] = c.line;
    rows.append(row);
  }
  return rows;
}

void configure(
    double output_sigmas, double accumulation_sigmas, const std::array<int64_t, 4>& panels,
    int64_t narrow, double check_steps, double mean_noise, double extreme) {
  configured_threshold_model = {output_sigmas, accumulation_sigmas, panels,           narrow,
                                check_steps,   mean_noise,          extreme * extreme};
}

}  // namespace

TORCH_LIBRARY(holdfast, m) {
  m.def("encode_rows(Tensor b) -> (Tensor row_sum, Tensor statistics)");
  m.def(
      "verify_rows(Tensor c, Tensor a, Tensor row_sum, Tensor statistics, Tensor? addend=None, "
      "float beta=1, float alpha=1, Tensor? b=None) -> Tensor");
}

TORCH_LIBRARY_IMPL(holdfast, CPU, m) {
  m.impl("encode_rows", &encode_rows);
  m.impl("verify_rows", &of_product<verify>);
}

PYBIND11_MODULE(_C, m) {
  m.def("install", &install);
  m.def(
      "configure", &configure, py::kw_only(), py::arg("output_sigmas"),
      py::arg("accumulation_sigmas"), py::arg("panels"), py::arg("narrow"), py::arg("check_steps"),
      py::arg("mean_noise"), py::arg("extreme"));
  m.def("configured", [] { return configured_threshold_model.configured(); });
  m.def("tables", &tables);
  m.def(
      "set_handlers", &set_handlers, py::arg("suspect"), py::arg("damaged_encoding"),
      py::arg("failed_check"), py::arg("attention_findings"), py::arg("convolution"));
  m.def("set_tolerances", &set_tolerances);
  m.def("count_suspects", &of_product<count_suspect_rows, bool>);
  m.def("detection_line", &of_product<detection_line>);
  m.def("known_encoding", &known_encoding);
  m.def("add_columns", &add_checked_columns, py::arg("sums"), py::arg("b"), py::arg("first"));
  m.def(
      "encoding_of_sums", &encoding_of_checked_sums, py::arg("sums"), py::arg("columns"),
      py::arg("like"));
  m.def("fingerprints", &fingerprints_of, py::arg("sums"));
  m.def("arm", &arm);
  m.def("change_process_depth", &change_process_depth);
  m.def("change_thread_depth", &change_thread_depth);
  m.def("change_thread_bypass", &change_thread_bypass);
  m.def("change_thread_compiled", &change_thread_compiled);
  m.def("push_module", &push_module, py::arg("module"), py::arg("scope"));
  m.def("pop_module", &pop_module);
  m.def("open_scope", &open_scope);
  m.def("close_scope", &close_scope);
  m.def("watch", &watch);
  m.def("unwatch", &unwatch);
  m.def("forget", &forget);
  m.def("forget_all", &forget_all);
  m.def("drop_damaged_encodings", [] {
    const Bypass bypass;
    return drop_damaged();
  });
  m.def("cached_encodings", &cached_encodings);
  m.def("counters", &list_counters);
  m.def("reset_counters", &reset_counters);
  bind_device(m);
  // The site of an operator that Python implements and calls on this thread.
  m.def("current_site", [](const std::string& op) { return name_of(current_site(op_named(op))); });
  m.def("verifying", &verifying);
  bind_embedding_bag(m);
  bind_int8_gemm(m);
  bind_kernels(m);
  m.def("simd_name", [] { return reductions().name; });
}

}  // namespace holdfast
