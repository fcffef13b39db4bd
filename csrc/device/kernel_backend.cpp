#include "device/kernel_backend.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "core/checksum_weights.h"
#include "device/kernel_launch.h"
#include "device/kernel_plan.h"

namespace holdfast::device {

namespace {

constexpr int64_t kMostColumns = 1 << 20;  // for which the signs are on the device
constexpr int64_t kMostBatches = 65535;  // programs along the second dimension of a grid
constexpr int64_t kLargestSize = (int64_t{1} << 31) - 4096;  // row numbers are 32 bits
constexpr int64_t kStreamCounters = 1 << 16, kGraphCounters = 1 << 20;
constexpr int64_t kVectorBytes = 16;

bool sums_are_wide(c10::ScalarType operand) {
  return operand == c10::ScalarType::Double || operand == c10::ScalarType::Float;
}

// A matrix or batch as the kernel takes it: an address and three strides.
struct View {
  const void* data = nullptr;
  c10::ScalarType dtype{};
  int64_t batch = 1, rows = 0, columns = 0;
  int64_t strides[3] = {};
  Layout layout = Layout::rows;
  bool aligned = false;

  explicit View(const at::Tensor& t)
      : data(t.const_data_ptr()), dtype(t.scalar_type()), rows(t.size(-2)), columns(t.size(-1)) {
    if (t.dim() == 3) batch = t.size(0), strides[0] = t.stride(0);
    strides[1] = t.stride(-2), strides[2] = t.stride(-1);
    const bool by_row = strides[2] == 1 || columns == 1, by_column = strides[1] == 1 || rows == 1;
    const bool one_column = columns == 1 && strides[1] == 1;
    if (by_row && !one_column) {
      layout = Layout::rows;
    } else {
      layout = by_column ? Layout::columns : Layout::neither;
    }
    const int64_t bytes = static_cast<int64_t>(c10::elementSize(dtype));
    const int64_t vector = kVectorBytes / bytes;
    const bool along_rows = layout == Layout::rows;
    aligned = layout != Layout::neither && reinterpret_cast<uintptr_t>(data) % kVectorBytes == 0 &&
        strides[0] % vector == 0 && strides[along_rows ? 1 : 2] % vector == 0 &&
        (along_rows ? columns : rows) % vector == 0;
  }

  Operand operand() const { return {layout, static_cast<int64_t>(c10::elementSize(dtype))}; }
  void add_to(Arguments& arguments) const {
    arguments.add_all(data, strides[0], strides[1], strides[2]);
  }
};

// What the kernel keeps on a device.
class Resident {
 public:
  explicit Resident(const c10::Device& device) : device_(device) {
    const auto options = at::TensorOptions().dtype(at::kChar).device(at::kCPU);
    at::Tensor host = at::empty({kMostColumns}, options);
    const Weights weights = sign_weights(kMostColumns);
    for (int64_t j = 0; j < kMostColumns; ++j) {
      host.data_ptr<int8_t>()[j] = weights.wide[j] < 0 ? -1 : 1;
    }
    for_graphs_ = zeros(kGraphCounters);
    // The copy waits for the stream, and so for the zeros.
    signs_ = host.to(device, /*non_blocking=*/false, /*copy=*/true);
  }

  const void* signs() const { return signs_.const_data_ptr(); }

  // Returns `count` counters that are zero when the launch begins. Launches of one stream share
  // theirs, as they run one after the other; one that is captured keeps its own for ever, as graphs
  // may run side by side.
  at::Tensor counters(int64_t count, void* stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!captured(stream)) {
      at::Tensor& own = by_stream_[stream];
      if (!own.defined() || own.numel() < count) own = zeros(std::max(count, kStreamCounters));
      return own;
    }
    if (used_ + count > kGraphCounters) return zeros(count);  // The graph will set them to zero.
    used_ += count;
    return for_graphs_.narrow(0, used_ - count, count);
  }

 private:
  at::Tensor zeros(int64_t count) const {
    return at::zeros({count}, at::TensorOptions().dtype(at::kInt).device(device_));
  }

  c10::Device device_;
  at::Tensor signs_, for_graphs_;
  std::mutex mutex_;  // guards the rest
  int64_t used_ = 0;
  std::unordered_map<void*, at::Tensor> by_stream_;
};

Resident& resident_on(const c10::Device& device) {
  static auto& all = *new std::unordered_map<c10::Device, std::unique_ptr<Resident>>;
  static auto& mutex = *new std::mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  auto& found = all[device];
  if (!found) {
    TORCH_CHECK(
        !captured(stream_of(device)),
        "holdfast: a graph is captured on a device that was not prepared: call prepare_kernels");
    found = std::make_unique<Resident>(device);
  }
  return *found;
}

// Two vectors that the kernel takes together; null where there are none.
struct Pair {
  const void* first = nullptr;
  const void* second = nullptr;

  Pair() = default;
  Pair(const at::Tensor& one, const at::Tensor& other, c10::ScalarType sums, int64_t length) {
    for (const at::Tensor* t : {&one, &other}) {
      TORCH_CHECK(
          t->defined() && t->scalar_type() == sums && t->numel() == length && t->is_contiguous() &&
              reinterpret_cast<uintptr_t>(t->const_data_ptr()) % kVectorBytes == 0,
          "holdfast: checksums of a product are not contiguous and aligned ", sums, " [", length,
          "]");
    }
    first = one.const_data_ptr(), second = other.const_data_ptr();
  }
};

// One launch: which matrices are read, and what is computed of them.
struct Launch {
  std::optional<View> c, addend, a;
  Work work;
  Pair encoding, across, known, encoded, summed;
  void* slot = nullptr;
  const void* scale = nullptr;  // of rows of C, or of columns of a matrix that is encoded
  int64_t scale_step = 0;
  Groups groups = Groups::none;
  const void* ends = nullptr;
  int32_t group_count = 0;
  double beta = 0, alpha = 1;
  DriftGrowth growth, column_growth;
  Tolerance tolerance;

  void run(const at::Tensor& like, c10::ScalarType sums) {
    const c10::DeviceGuard guard(like.device());
    Resident& resident = resident_on(like.device());
    void* stream = stream_of(like.device());
    work.sum_bytes = static_cast<int64_t>(c10::elementSize(sums));
    const Plan plan = Plan::of(work);
    const at::Tensor partials = at::empty({plan.partials}, like.options().dtype(sums));
    const at::Tensor counters = resident.counters(plan.counters, stream);
    Arguments arguments;
    for (const auto* each : {&c, &addend, &a}) {
      if (*each) {
        (*each)->add_to(arguments);
      } else {
        arguments.add_all(static_cast<void*>(nullptr), int64_t{0}, int64_t{0}, int64_t{0});
      }
    }
    arguments.add(resident.signs());
    for (const Pair& pair : {encoding, across, known}) arguments.add_all(pair.first, pair.second);
    arguments.add_all(partials.data_ptr(), counters.data_ptr(), slot);
    for (const Pair& pair : {encoded, summed}) arguments.add_all(pair.first, pair.second);
    arguments.add_all(
        static_cast<int32_t>(work.rows), static_cast<int32_t>(work.columns),
        static_cast<int32_t>(work.inner));
    arguments.add_all(
        plan.c.programs, plan.c.parts, plan.c.steps, plan.a.parts, plan.a.steps, beta, alpha);
    arguments.add_all(growth.drifting, growth.repeating);
    arguments.add_all(column_growth.drifting, column_growth.repeating);
    arguments.add_all(
        tolerance.scale, tolerance.output, tolerance.walk, tolerance.drift, tolerance.floor);
    arguments.add_all(scale, scale_step, ends, group_count);
    // Triton's kernels end in two addresses of workspaces that this one does not use.
    arguments.add_all(static_cast<void*>(nullptr), static_cast<void*>(nullptr));
    launch(
        variant_of(key(plan, like.device(), sums)), static_cast<unsigned>(plan.programs()),
        static_cast<unsigned>(work.batch), stream, arguments);
  }

  void take_addend(const at::Tensor& given, const at::Tensor& like, double factor) {
    addend.emplace(given.sizes() == like.sizes() ? given : given.expand(like.sizes()));
    TORCH_CHECK(
        given.device() == like.device(), "holdfast: the addend is on ", given.device(),
        ", its product on ", like.device());
    work.addend = true;
    beta = factor;
  }

  // Takes scales that were found to be of one element, or of all that a dimension has.
  void take_scale(const at::Tensor& given, int64_t dimension, const at::Tensor& like) {
    if (!given.defined()) return;
    TORCH_CHECK(
        given.device() == like.device() && given.scalar_type() == at::kFloat,
        "holdfast: scales of a product are ", given.scalar_type(), " on ", given.device());
    scale = given.const_data_ptr();
    scale_step = given.numel() == 1 ? 0 : given.stride(dimension);
  }

  void take_groups(const Judged& judged) {
    const at::Tensor& given = judged.problem.ends;
    if (!given.defined()) return;
    TORCH_CHECK(
        given.device() == judged.c.device() && given.is_contiguous() &&
            given.scalar_type() == at::kInt,
        "holdfast: offsets of groups are ", given.scalar_type(), " on ", given.device());
    groups = divides_inner(judged) ? Groups::inner : Groups::rows;
    ends = given.const_data_ptr();
    group_count = static_cast<int32_t>(given.numel());
  }

  void ask_encoding(const Encoding& of_a, c10::ScalarType sums) {
    encoded = {of_a.row_sum, of_a.statistics, sums, a->batch * a->rows};
    growth = DriftGrowth::of(a->rows);
    work.encode = true;
  }

  void ask_encoding_of_columns(const Encoding& transposed, c10::ScalarType sums) {
    summed = {transposed.row_sum, transposed.statistics, sums, a->columns};
    column_growth = DriftGrowth::of(a->columns);
    work.across = true;
  }

  VariantKey key(const Plan& plan, const c10::Device& device, c10::ScalarType sums) const {
    VariantKey key;
    key.device = device.index();
    key.sums = sums;
    const View& any = c ? *c : *a;
    const View &of_c = c ? *c : any, &of_d = addend ? *addend : any, &of_a = a ? *a : any;
    key.c = of_c.dtype, key.d = of_d.dtype, key.a = of_a.dtype;
    if (c) key.c_layout = c->layout, key.c_aligned = c->aligned;
    if (addend) key.d_layout = addend->layout, key.d_aligned = addend->aligned;
    if (a) key.a_layout = a->layout, key.a_aligned = a->aligned;
    key.addend = work.addend, key.encode = work.encode, key.across = work.across;
    key.predict = c.has_value() && a.has_value(), key.turned = work.turned();
    key.scaled = scale != nullptr, key.groups = groups;
    key.tiles = {
        static_cast<uint16_t>(plan.c.tile_rows), static_cast<uint16_t>(plan.c.tile_columns),
        static_cast<uint16_t>(plan.a.tile_rows), static_cast<uint16_t>(plan.a.tile_columns)};
    return key;
  }
};

Encoding empty_encoding(const View& rows, const at::Tensor& like, c10::ScalarType sums) {
  const auto options = like.options().dtype(sums);
  return {at::empty({rows.batch, rows.rows}, options), at::empty({rows.batch, rows.rows}, options)};
}

// Returns room for an encoding and its copy, which the kernel takes to lie behind it.
EncodedTwice empty_twice(
    int64_t batch, int64_t rows, const at::Tensor& like, c10::ScalarType sums) {
  const auto options = like.options().dtype(sums);
  const at::Tensor row_sum = at::empty({2, batch, rows}, options);
  const at::Tensor statistics = at::empty({2, batch, rows}, options);
  return {{row_sum[0], statistics[0]}, {row_sum[1], statistics[1]}};
}

EncodedTwice zeroed(const EncodedTwice& twice) {
  for (const Encoding& each : {twice.encoding, twice.copy}) {
    each.row_sum.zero_();
    each.statistics.zero_();
  }
  return twice;
}

class KernelBackend : public Backend {
 public:
  const char* obstacle(const Problem& p) const override {
    const at::Tensor &a = p.a, &b = p.b;
    const bool float8 = is_float8(a.scalar_type()) && is_float8(b.scalar_type());
    if (!supported(a) && !float8) return "its dtype is not one that the device kernels read";
    if (a.scalar_type() != b.scalar_type() && !float8) return "its operands differ in dtype";
    if (b.size(-1) > kMostColumns) return "it has more than 2^20 columns";
    if (a.size(-2) > kLargestSize || a.size(-1) > kLargestSize) return "it has 2^31 rows or more";
    const int64_t matrices = p.ends.defined() ? p.ends.numel() : a.dim() == 3 ? a.size(0) : 1;
    if (matrices > kMostBatches) return "it has more than 65535 matrices";
    return "";
  }

  EncodedTwice encode_twice(const at::Tensor& b, const at::Tensor& column_scale) override {
    const c10::NoGradGuard no_grad;
    const auto sums = sums_are_wide(b.scalar_type()) ? at::kDouble : at::kFloat;
    Launch task;
    task.a.emplace(b);
    EncodedTwice of_b = empty_twice(task.a->batch, task.a->rows, b, sums);
    if (b.numel() == 0) return zeroed(of_b);
    TORCH_CHECK(
        task.a->columns <= kMostColumns && task.a->batch <= kMostBatches,
        "holdfast: a right operand ", b.sizes(), " is too large to be encoded");
    task.work = {task.a->batch, task.a->rows, 0, task.a->columns, {}, task.a->operand()};
    task.ask_encoding(of_b.encoding, sums);
    task.take_scale(column_scale, 1, b);
    task.run(b, sums);
    return of_b;
  }

  std::pair<EncodedTwice, EncodedTwice> encode_both(const at::Tensor& b) override {
    const c10::NoGradGuard no_grad;
    if (b.numel() == 0 || std::max(b.size(0), b.size(1)) > kMostColumns) {
      return {encode_twice(b, {}), encode_twice(b.t(), {})};
    }
    const bool transposed = View(b).layout == Layout::columns;
    const at::Tensor by_rows = transposed ? b.t() : b;
    const auto sums = sums_are_wide(b.scalar_type()) ? at::kDouble : at::kFloat;
    Launch task;
    task.a.emplace(by_rows);
    EncodedTwice of_rows = empty_twice(1, task.a->rows, b, sums);
    EncodedTwice of_columns = empty_twice(1, task.a->columns, b, sums);
    task.work = {1, task.a->rows, 0, task.a->columns, {}, task.a->operand()};
    task.ask_encoding(of_rows.encoding, sums);
    task.ask_encoding_of_columns(of_columns.encoding, sums);
    task.run(b, sums);
    if (transposed) std::swap(of_rows, of_columns);
    return {of_rows, of_columns};
  }

  void judge(const Judged& judged, Sharing& sharing) override {
    const c10::NoGradGuard no_grad;
    const Problem& p = judged.problem;
    if (judged.c.numel() == 0 || p.a.numel() == 0) return;
    const auto sums = sums_are_wide(p.a.scalar_type()) ? at::kDouble : at::kFloat;
    Launch task;
    task.c.emplace(judged.c);
    const View a(p.a);
    task.work = {task.c->batch, a.rows, task.c->columns, a.columns, task.c->operand(), {}};
    task.slot = judged.slot.data_ptr();
    task.alpha = p.alpha, task.tolerance = judged.tolerance;
    if (p.addend && p.beta != 0) task.take_addend(*p.addend, judged.c, p.beta);
    task.take_scale(p.row_scale, 0, judged.c);
    task.take_groups(judged);
    if (sharing.dots.defined()) {
      task.known = {sharing.dots, sharing.walks, sums, a.batch * a.rows};
    } else {
      task.a = a;
      task.work.a = a.operand();
      const Encoding& of_b = judged.encoding;
      const int64_t matrices = task.groups == Groups::rows ? task.group_count : a.batch;
      task.encoding = {of_b.row_sum, of_b.statistics, sums, matrices * a.columns};
    }
    ask_for_sharing(task, sharing, p.a, sums);
    task.run(judged.c, sums);
  }

 private:
  static void ask_for_sharing(
      Launch& task, Sharing& sharing, const at::Tensor& a, c10::ScalarType sums) {
    if (!task.a) return;
    if (sharing.across) {
      const auto options = a.options().dtype(sums);
      const Encoding& by = *sharing.across;
      task.across = {by.row_sum, by.statistics, sums, task.a->rows};
      sharing.column_sums = at::empty({task.a->columns}, options);
      sharing.column_walks = at::empty({task.a->columns}, options);
      task.summed = {sharing.column_sums, sharing.column_walks, sums, task.a->columns};
      task.work.across = true;
      if (!task.work.turned()) return;
      task.a.emplace(a.t());
      std::swap(task.encoding, task.across);
    } else if (sharing.encode_a && task.a->columns <= kMostColumns) {
      if (!sharing.of_a.row_sum.defined()) sharing.of_a = empty_encoding(*task.a, a, sums);
      sharing.encoded = true;
      task.ask_encoding(sharing.of_a, sums);
    }
  }
};

}  // namespace

Backend& kernel_backend() {
  static auto& backend = *new KernelBackend;
  return backend;
}

void prepare_kernels(const c10::Device& device) { resident_on(device); }

}  // namespace holdfast::device
