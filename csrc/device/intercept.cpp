#include "device/intercept.h"

#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <array>
#include <memory>
#include <optional>
#include <utility>

#include "core/callbacks.h"
#include "device/ledger.h"
#include "device/scaled_and_grouped.h"
#include "gemm/encoding_cache.h"
#include "gemm/guarded.h"
#include "gemm/linear_reuse.h"

namespace holdfast::device {

namespace {

using at::Tensor;
using torch::jit::Stack;

// Where a product's result comes from: a new tensor, the last argument, or the first.
enum class Writes { fresh, out, first };

struct Product {
  const char* name;
  Op op;
  Writes writes;
  Reader read = nullptr;  // of what follows the operands, if that is not beta and alpha
};

constexpr Product kProducts[] = {
    {"mm", Op::mm, Writes::fresh},
    {"mm.out", Op::mm, Writes::out},
    {"bmm", Op::bmm, Writes::fresh},
    {"bmm.out", Op::bmm, Writes::out},
    {"addmm", Op::addmm, Writes::fresh},
    {"addmm.out", Op::addmm, Writes::out},
    {"addmm_", Op::addmm, Writes::first},
    {"baddbmm", Op::baddbmm, Writes::fresh},
    {"baddbmm.out", Op::baddbmm, Writes::out},
    {"baddbmm_", Op::baddbmm, Writes::first},
    {"_scaled_mm", Op::scaled_mm, Writes::fresh, &read_scaled},
    {"_scaled_mm.out", Op::scaled_mm, Writes::out, &read_scaled},
    {"_scaled_mm_v2", Op::scaled_mm, Writes::fresh, &read_recipes},
    {"_scaled_mm_v2.out", Op::scaled_mm, Writes::out, &read_recipes},
    {"_grouped_mm", Op::grouped_mm, Writes::fresh, &read_grouped},
};

// The interception of one dispatch key. Its libraries restore the kernels when they are destroyed.
struct Interception {
  Backend* backend = nullptr;
  std::string reason;
  std::vector<std::unique_ptr<torch::Library>> libraries;
};

constexpr size_t kTypes = static_cast<size_t>(c10::DeviceType::COMPILE_TIME_MAX_DEVICE_TYPES);
auto& interceptions = *new std::array<std::unique_ptr<Interception>, kTypes>;

Interception* interception_of(c10::DeviceType type) {
  return interceptions[static_cast<size_t>(type)].get();
}

Precision precision_of(const Problem& p) {
  if (p.fast_sums) return Precision::fast;
  const Tensor& a = p.a;
  const bool reduced = a.scalar_type() == at::kFloat && !a.is_cpu() &&
      at::globalContext().float32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL) ==
          at::Float32Precision::TF32;
  return reduced ? Precision::tf32 : Precision::ieee;
}

// The encoding of B, a kept one if there is one.
KnownEncoding encoding_of_operand(Backend& backend, const Problem& p, Role role, bool captured) {
  // One with scales belongs to these.
  if (p.column_scale.defined()) return {backend.encode(p.b, p.column_scale), false, false};
  const OperandEncoder encoder{
      [&](const Tensor& b) { return backend.encode_twice(b, {}); },
      [&](const Tensor& b) { return backend.encode_both(b); }};
  return encoding_of(p.b, role, encoder, captured);
}

// What a check in compiled code is given by the check before it, and is to give the one after it.
struct Handed {
  std::optional<Encoding> encoding;  // of B
  Sharing sharing;
};

// Numbers before an encoding that was made, in the storage of a tensor that hands it on. One that
// begins where its storage does was not made, as its product was not verified.
constexpr int64_t kMade = 4;

// Returns room for the encoding of an activation A [rows, K]: [2, rows], where a multiple of four
// rows keeps both halves aligned.
Tensor room_for(const Tensor& a, bool made) {
  const bool wide = a.scalar_type() == at::kFloat || a.scalar_type() == at::kDouble;
  const int64_t rows = (a.size(0) + 3) / 4 * 4;
  const auto options = a.options().dtype(wide ? at::kDouble : at::kFloat);
  const Tensor all = at::empty({kMade + 2 * rows}, options);
  return all.narrow(0, made ? kMade : 0, 2 * rows).view({2, rows});
}

Encoding in_room(const Tensor& room, int64_t rows) {
  const Tensor used = room.narrow(1, 0, rows);
  return {used.narrow(0, 0, 1), used.narrow(0, 1, 1)};
}

// Returns the encoding of B that compiled code handed on; none if it was not made.
std::optional<Encoding> handed_on(const std::optional<Tensor>& room, const Tensor& b) {
  if (!room || room->storage_offset() != kMade) return std::nullopt;
  return in_room(*room, b.size(0));
}

// Queues the verification of a product that was computed; the ledger gets the verdict.
void queue_check(
    Backend& backend, const SiteKey& key, const Problem& p, const Tensor& c,
    const KnownEncoding& known, bool captured, Handed* handed) {
  const auto tolerance =
      Tolerance::of(p.a.scalar_type(), c.scalar_type(), p.a.size(-1), c.size(-1), precision_of(p));
  const Judged judged{c, p, known.encoding, tolerance, slot_of(key, c.device())};
  if (handed != nullptr) {
    backend.judge(judged, handed->sharing);
  } else {
    const bool shares = !p.column_scale.defined() && !p.ends.defined();
    Sharing sharing = !shares ? Sharing{} : sharing_for(p, known, key.role, true);
    backend.judge(judged, sharing);
    share(p, sharing, !captured);
  }
  note_check(c.device());
}

template <typename Run>
void checked(
    Interception& by, Op op, const Problem& problem, const Run& run, Handed* handed = nullptr) {
  if (!well_formed(problem)) return static_cast<void>(run());
  const SiteKey key = current_site(op);
  const char* obstacle = by.backend == nullptr ? by.reason.c_str() : by.backend->obstacle(problem);
  const auto dtype = problem.a.scalar_type();
  const bool mixed = dtype != problem.b.scalar_type() && !is_float8(dtype);
  if (mixed || *obstacle != '\0') {
    count_unverified(key, mixed ? kNoThreshold : obstacle);
    return static_cast<void>(alone(run));
  }
  const bool captured = capturing(problem.a.device());
  std::optional<KnownEncoding> known;
  const bool encoded = succeeds(key, [&] {
    const Bypass bypass;
    if (handed != nullptr && handed->encoding) {
      known.emplace(KnownEncoding{*handed->encoding, false, false});
    } else {
      known.emplace(encoding_of_operand(*by.backend, problem, key.role, captured));
    }
  });
  if (!encoded) {
    count_unverified(key, kFailed);
    return static_cast<void>(alone(run));
  }
  const Encoding& encoding = known->encoding;
  visit(Stage::checksum, key, problem, encoding, {});
  visit(Stage::operand, key, problem, encoding, {});
  const Tensor output = alone(run);
  visit(Stage::output, key, problem, encoding, output);
  if (!verifying()) return;
  const bool queued = succeeds(key, [&] {
    const Bypass bypass;
    queue_check(*by.backend, key, problem, output, *known, captured, handed);
  });
  if (!queued) return count_unverified(key, kFailed);
  count_verified(key, output.numel() / output.size(-1), 0, {});
}

// Calls the kernel that was there before and has its product verified. It is boxed, as the kernel
// may be a Python function.
class Wrapped : public c10::OperatorKernel {
 public:
  Wrapped(c10::SafeKernelFunction kernel, Product product, Interception& by)
      : kernel_(std::move(kernel)), product_(product), by_(by) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    if (!intercepting()) return kernel_.callBoxed(op, keys, stack);
    if (in_compiled_code()) {
      const Bypass bypass;
      return kernel_.callBoxed(op, keys, stack);
    }
    const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
    const bool fused = product_.op == Op::addmm || product_.op == Op::baddbmm;
    const size_t first = fused ? 1 : 0;
    Problem p{std::nullopt, arguments[first].toTensor(), arguments[first + 1].toTensor()};
    const auto run = [&] {
      kernel_.callBoxed(op, keys, stack);
      return stack->back().toTensor();
    };
    if (!may_check(p, arguments, fused)) return static_cast<void>(alone(run));
    checked(by_, product_.op, p, run);
  }

 private:
  // Reads scales, groups and the addend, which is copied if the product overwrites it; false if the
  // product is not verified.
  bool may_check(Problem& p, c10::ArrayRef<c10::IValue> arguments, bool fused) const {
    std::optional<Tensor> out;
    if (product_.writes == Writes::out) out = arguments.back().toTensor();
    if (product_.writes == Writes::first) out = arguments.front().toTensor();
    if (fused) {
      const at::Scalar beta = arguments[3].toScalar(), alpha = arguments[4].toScalar();
      if (!verifiable(product_.op, beta, alpha)) return false;
      p.beta = beta.toDouble();
      p.alpha = alpha.toDouble();
      p.addend = arguments[0].toTensor();
    }
    if (product_.read != nullptr) {
      const char* obstacle = product_.read(arguments, p);
      if (*obstacle != '\0') {
        count_unverified(current_site(product_.op), obstacle);
        return false;
      }
    }
    if (!out) return true;
    if (!verifiable(product_.op, *out, p.a, p.b)) return false;
    if (p.addend && out->is_alias_of(*p.addend)) p.addend = p.addend->clone();
    return true;
  }

  c10::SafeKernelFunction kernel_;
  Product product_;
  Interception& by_;
};

void wrap(Interception& by, c10::DispatchKey key) {
  for (const Product& product : kProducts) {
    const std::string full = std::string("aten::") + product.name;
    const auto dot = full.find('.');
    const std::string overload = dot == full.npos ? "" : full.substr(dot + 1);
    const auto handle = c10::Dispatcher::singleton().findSchema({full.substr(0, dot), overload});
    // A build may lack the device, and an older torch the product.
    if (!handle || !handle->hasComputedKernelForDispatchKey(key)) continue;
    auto kernel =
        std::make_unique<Wrapped>(handle->getComputedKernelForDispatchKey(key), product, by);
    auto library =
        std::make_unique<torch::Library>(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
    library->impl(product.name, torch::CppFunction::makeFromBoxedFunctor(std::move(kernel)));
    by.libraries.push_back(std::move(library));
  }
}

// Verifies a product of compiled code, which computed it by a kernel of its own choice.
void judge_compiled(
    const Tensor& c, const Problem& problem, const SiteKey& key, Handed* handed = nullptr) {
  const Named named(key);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  checked(*interception_of(c.device().type()), key.op, problem, [&] { return c; }, handed);
}

bool judges(const Tensor& c) {
  return interception_of(c.device().type()) != nullptr && intercepting();
}

void verdict(
    const Tensor& c, const Tensor& a, const Tensor& b, const std::optional<Tensor>& addend,
    const at::Scalar& beta, const at::Scalar& alpha, int64_t module, std::string_view op,
    int64_t ordinal, int64_t role, const std::optional<Tensor>& encoding) {
  if (!judges(c)) return;
  Handed handed{handed_on(encoding, b), {}};
  judge_compiled(
      c, {addend, a, b, beta.toDouble(), alpha.toDouble()}, site_key(module, op, ordinal, role),
      handed.encoding ? &handed : nullptr);
}

// Verifies a product Y = X W and returns the encoding of X for the check of dW = dYᵀ X.
Tensor verdict_and_encoding(
    const Tensor& c, const Tensor& a, const Tensor& b, const std::optional<Tensor>& addend,
    const at::Scalar& beta, const at::Scalar& alpha, int64_t module, std::string_view op,
    int64_t ordinal, int64_t role) {
  if (!judges(c)) return room_for(a, false);
  const Tensor room = room_for(a, true);
  Handed handed;
  handed.sharing.encode_a = true;
  handed.sharing.of_a = in_room(room, a.size(0));
  const Problem problem{addend, a, b, beta.toDouble(), alpha.toDouble()};
  judge_compiled(c, problem, site_key(module, op, ordinal, role), &handed);
  return handed.sharing.encoded ? room : room_for(a, false);
}

// Verifies a product of which the arguments are those of its op in aten, behind the result and the
// site.
class VerdictOf : public c10::OperatorKernel {
 public:
  explicit VerdictOf(const Product& product) : product_(product) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
    const size_t count = op.schema().arguments().size();
    const auto all = torch::jit::last(*stack, count);
    const Tensor c = all[0].toTensor();
    if (judges(c)) judge(c, all.slice(1, 4), all.slice(5));
    torch::jit::drop(*stack, count);
  }

 private:
  void judge(const Tensor& c, c10::ArrayRef<c10::IValue> site, c10::ArrayRef<c10::IValue> given) {
    const SiteKey key =
        site_key(site[0].toInt(), site[1].toStringView(), site[2].toInt(), site[3].toInt());
    Problem p{std::nullopt, given[0].toTensor(), given[1].toTensor()};
    const char* obstacle = product_.read(given, p);
    if (*obstacle != '\0') return count_unverified(key, obstacle);
    judge_compiled(c, p, key);
  }

  const Product& product_;
};

std::string verdict_of(const Product& product) { return std::string("verdict_of") + product.name; }

// Defines such an op for each product whose arguments are read: `holdfast::verdict_of_scaled_mm`.
void define_verdicts(torch::Library& m) {
  for (const Product& product : kProducts) {
    if (product.read == nullptr || product.writes != Writes::fresh) continue;
    const auto handle =
        c10::Dispatcher::singleton().findSchema({std::string("aten::") + product.name, ""});
    if (!handle) continue;
    std::vector<c10::Argument> arguments{{"c", c10::TensorType::get()}};
    for (const char* name : {"module", "op", "ordinal", "role"}) {
      const bool text = std::string_view(name) == "op";
      arguments.emplace_back(
          name, text ? c10::TypePtr(c10::StringType::get()) : c10::TypePtr(c10::IntType::get()));
    }
    const auto& given = handle->schema().arguments();
    arguments.insert(arguments.end(), given.begin(), given.end());
    m.def(c10::FunctionSchema("holdfast::" + verdict_of(product), "", std::move(arguments), {}));
  }
}

// Returns true for dX = dY W and dW = dYᵀ X, of which one check can read what both need of dY.
bool of_one_gradient(const Problem& dx, const Problem& dw) {
  return well_formed(dx) && well_formed(dw) && dx.a.dim() == 2 && dw.a.dim() == 2 &&
      dx.a.is_contiguous() && dw.a.const_data_ptr() == dx.a.const_data_ptr() &&
      dw.a.sizes() == dx.a.t().sizes() && dw.a.strides() == dx.a.t().strides() &&
      dw.a.scalar_type() == dx.a.scalar_type() && dw.b.scalar_type() == dx.a.scalar_type();
}

// A product's transpose is Cᵀ = beta · addendᵀ + alpha · Bᵀ Aᵀ.
Problem transposed(const Problem& p, const Tensor& c) {
  std::optional<Tensor> addend;
  if (p.addend) addend = p.addend->expand(c.sizes()).t();
  return {addend, p.b.t(), p.a.t(), p.beta, p.alpha};
}

// Verifies the products dX = dY W and dW = dYᵀ X of compiled code, and reads dY once: by the
// encoding of X, which is made here if none was handed on, the check of dX sums the columns of dY,
// as the check of dW needs them. If dW is Xᵀ dY, its transpose is verified.
void verdict_of_gradients(
    const Tensor& dx, const Tensor& a, const Tensor& b, const std::optional<Tensor>& addend,
    const at::Scalar& beta, const at::Scalar& alpha, const Tensor& dw, const Tensor& a_of_dw,
    const Tensor& b_of_dw, const std::optional<Tensor>& addend_of_dw, const at::Scalar& beta_of_dw,
    const at::Scalar& alpha_of_dw, int64_t module, std::string_view op, int64_t ordinal,
    const std::optional<Tensor>& encoding) {
  if (!judges(dx)) return;
  Backend* by = interception_of(dx.device().type())->backend;
  const SiteKey of_dx = site_key(module, op, ordinal, static_cast<int64_t>(Role::grad_a));
  const SiteKey of_dw = site_key(module, op, ordinal, static_cast<int64_t>(Role::grad_b));
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Problem problem{addend, a, b, beta.toDouble(), alpha.toDouble()};
  Problem next{addend_of_dw, a_of_dw, b_of_dw, beta_of_dw.toDouble(), alpha_of_dw.toDouble()};
  Tensor output = dw;
  if (dw.dim() == 2 && of_one_gradient(problem, transposed(next, dw))) {
    next = transposed(next, dw);
    output = dw.t();
  }
  Handed first, second;
  const bool shared = by != nullptr && of_one_gradient(problem, next) &&
      *by->obstacle(next) == '\0' && succeeds(of_dw, [&] {
                        const Bypass bypass;
                        const auto known = handed_on(encoding, next.b);
                        first.sharing.across = known ? *known : by->encode(next.b);
                      });
  judge_compiled(dx, problem, of_dx, shared ? &first : nullptr);
  second.encoding = first.sharing.across;
  second.sharing.dots = first.sharing.column_sums;
  second.sharing.walks = first.sharing.column_walks;
  judge_compiled(output, next, of_dw, shared ? &second : nullptr);
}

// Returns the encoding of an activation that no check of a forward product makes.
Tensor encoding_alone(const Tensor& a) {
  const Interception* by = interception_of(a.device().type());
  if (by == nullptr || by->backend == nullptr || !verifying()) return room_for(a, false);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const Bypass bypass;
  const Encoding made = by->backend->encode(a);
  const Tensor room = room_for(a, true);
  const Encoding kept = in_room(room, a.size(0));
  kept.row_sum.copy_(made.row_sum);
  kept.statistics.copy_(made.statistics);
  return room;
}

}  // namespace

void intercept(const std::string& name, Backend* backend, const std::string& reason) {
  const c10::DispatchKey key = c10::parseDispatchKey(name);
  const c10::DeviceType type = c10::dispatchKeyToDeviceType(key);
  auto& by = interceptions[static_cast<size_t>(type)];
  const bool fresh = by == nullptr;
  if (fresh) by = std::make_unique<Interception>();
  by->backend = backend;
  by->reason = reason;
  if (!fresh) return;
  const Quiet quiet;
  wrap(*by, key);
}

void release(const std::string& name) {
  interceptions[static_cast<size_t>(c10::dispatchKeyToDeviceType(c10::parseDispatchKey(name)))]
      .reset();
}

bool intercepts(c10::DeviceType type) {
  const Interception* by = interception_of(type);
  return by != nullptr && by->backend != nullptr;
}

namespace {

void implement(torch::Library& m) {
  m.impl("verdict", &verdict);
  m.impl("verdict_of_gradients", &verdict_of_gradients);
  m.impl("verdict_and_encoding", &verdict_and_encoding);
  m.impl("encoding", &encoding_alone);
  m.impl("carried", [](const Tensor& value, const Tensor&, const std::optional<Tensor>&) {
    return value.clone();
  });
  m.impl("handed", [](const Tensor&, const Tensor&) {});
  for (const Product& product : kProducts) {
    const std::string name = verdict_of(product);
    if (!c10::Dispatcher::singleton().findSchema({"holdfast::" + name, ""})) continue;
    auto kernel = std::make_unique<VerdictOf>(product);
    m.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::move(kernel)));
  }
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(holdfast, m) {
  const std::string product =
      "Tensor c, Tensor a, Tensor b, Tensor? addend, Scalar beta, Scalar alpha, ";
  const std::string site = "int module, str op, int ordinal, ";
  const auto define = [&](const std::string& schema) { m.def(schema.c_str()); };
  define("verdict(" + product + site + "int role, Tensor? encoding=None) -> ()");
  define("verdict_and_encoding(" + product + site + "int role) -> Tensor");
  define(
      "verdict_of_gradients(Tensor dx, Tensor a, Tensor b, Tensor? addend, Scalar beta, "
      "Scalar alpha, Tensor dw, Tensor a_of_dw, Tensor b_of_dw, Tensor? addend_of_dw, "
      "Scalar beta_of_dw, Scalar alpha_of_dw, " +
      site + "Tensor? encoding=None) -> ()");
  // In a joint graph the encoding of `a` reaches the backward pass as `carried` needs it, and in a
  // backward graph `handed` says so. Protected graphs run none of the three unless they changed.
  m.def("encoding(Tensor a) -> Tensor");
  m.def("carried(Tensor value, Tensor encoding, Tensor? a=None) -> Tensor");
  m.def("handed(Tensor encoding, Tensor a) -> ()");
  define_verdicts(m);
}
TORCH_LIBRARY_IMPL(holdfast, CPU, m) { implement(m); }
TORCH_LIBRARY_IMPL(holdfast, CUDA, m) { implement(m); }

}  // namespace holdfast::device
