#include "core/sites.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

namespace holdfast {

namespace {

constexpr size_t kOps = static_cast<size_t>(Op::quantized_convolution) + 1;
constexpr uint16_t kLastOrdinal = 999;  // Further calls in one module share the last number.
constexpr int64_t kCallsPerLine = 1024;  // A line reads all of B in fp64.
constexpr uint64_t kForwardSites = 1 << 16;

size_t slot_of(const NodeId& node) { return (node.sequence + node.thread * 4099) % kForwardSites; }

struct Frame {
  uint32_t module, scope;
  const void* node;  // The autograd node that was evaluated when the module was entered.
  std::array<uint16_t, kOps> calls{};
};

// The site whose product made an autograd node.
struct ForwardSite {
  NodeId node;
  SiteKey key;
};

struct ThreadState {
  std::vector<Frame> modules;
  NodeId node;
  unsigned node_calls = 0;
  NodeId product;  // current_node() returns it.
  uint64_t closings = 0;  // The number of closed scopes whose modules have been removed.
  std::optional<SiteKey> name;  // The site that an instance of Named has set.
  bool any_op = false;  // The op of that site is replaced by that of the kernel that is called.
};
thread_local ThreadState thread;

struct Shared {
  std::mutex mutex;  // It guards all members below.
  std::unordered_map<uint64_t, SiteCounters> site_counters;
  std::vector<ForwardSite> forward_sites;
  std::unordered_set<uint32_t> scopes;  // These are open.
  uint32_t last_scope = 0;
};
std::atomic<uint64_t> closings{0};
Shared& shared = *new Shared;  // It is never destroyed, as threads may outlive main().

// Leaves the modules whose protection has ended. A thread that was inside one of them at that time
// gets no call of pop_module.
void drop_closed() {
  const uint64_t now = closings.load(std::memory_order_acquire);
  if (thread.closings == now) return;
  thread.closings = now;
  const std::lock_guard<std::mutex> lock(shared.mutex);
  std::erase_if(thread.modules, [](const Frame& f) { return !shared.scopes.contains(f.scope); });
}

// Stores the site of the newest autograd node. Autograd makes the node of an op just before it
// calls the kernel. An op that makes no node finds that of an earlier op, whose site must stay, so
// a known node keeps its site.
NodeId remember(const SiteKey& key) {
  const NodeId node{at::RecordFunction::currentThreadId(), at::sequence_number::peek() - 1};
  const std::lock_guard<std::mutex> lock(shared.mutex);
  if (shared.forward_sites.empty()) shared.forward_sites.resize(kForwardSites);
  ForwardSite& site = shared.forward_sites[slot_of(node)];
  if (!(site.node == node)) site = {node, key};
  return node;
}

SiteKey forward_site(Op op) {
  SiteKey key{0, op, 0, Role::forward};
  if (!thread.modules.empty()) {
    Frame& frame = thread.modules.back();
    uint16_t& calls = frame.calls[static_cast<size_t>(op)];
    key.module = frame.module;
    key.ordinal = calls;
    if (calls < kLastOrdinal) ++calls;
  }
  thread.product = remember(key);
  return key;
}

template <typename Node>
SiteKey backward_site(const Node& node, Op op) {
  const NodeId id{node->thread_id(), node->sequence_nr()};
  thread.node_calls = id == thread.node ? thread.node_calls + 1 : 0;
  thread.node = thread.product = id;
  SiteKey key{0, op, 0, Role::forward};
  {
    const std::lock_guard<std::mutex> lock(shared.mutex);
    if (!shared.forward_sites.empty()) {
      const ForwardSite& site = shared.forward_sites[slot_of(id)];
      if (site.node == id) key = site.key;
    }
  }
  // The last two inputs are a and b: addmm and baddbmm take an addend before them.
  const auto edges = node->num_outputs();
  const bool a = edges >= 2 && node->task_should_compute_output(edges - 2);
  const bool b = edges >= 2 && node->task_should_compute_output(edges - 1);
  // Torch computes the gradient of b first for mm and bmm, and that of a first for the others.
  const bool b_now = (thread.node_calls % 2 == 1) != (edges == 2);
  const bool vector = key.op == Op::addmv;  // The gradient of its matrix is not a matrix product.
  key.role = (a && b && !vector ? b_now : b) ? Role::grad_b : Role::grad_a;
  if (at::GradMode::is_enabled())
    remember(key);  // It may be differentiated again, under the same site.
  return key;
}

SiteCounters& counters_of(const SiteKey& key) {
  SiteCounters& entry = shared.site_counters[key.packed()];
  entry.key = key;
  return entry;
}

}  // namespace

const char* op_name(Op op) {
  static constexpr const char* names[kOps] = {
      "mm",
      "addmm",
      "bmm",
      "baddbmm",
      "addmv",
      "dot",
      "_addmm_activation",
      "sdpa",
      "sdpa_backward",
      "_int_mm",
      "_scaled_mm",
      "_weight_int8pack_mm",
      "_weight_int4pack_mm",
      "quantized_linear",
      "mkldnn_linear",
      "sparse_mm",
      "sparse_addmm",
      "sparse_bmm",
      "sparse_mv",
      "_grouped_mm",
      "convolution",
      "mkldnn_convolution",
      "quantized_convolution"};
  return names[static_cast<size_t>(op)];
}

Op op_named(std::string_view name) {
  for (size_t op = 0; op < kOps; ++op) {
    if (name == op_name(static_cast<Op>(op))) return static_cast<Op>(op);
  }
  TORCH_CHECK_VALUE(false, "holdfast: ", name, " is not the name of an intercepted op");
}

SiteKey site_key(int64_t module, std::string_view op, int64_t ordinal, int64_t role) {
  SiteKey key;
  key.module = static_cast<uint32_t>(module);
  key.op = op_named(op);
  key.ordinal = static_cast<uint16_t>(ordinal);
  key.role = static_cast<Role>(role);
  return key;
}

bool covered(Op op) {
  const bool attention = op == Op::sdpa || op == Op::sdpa_backward;
  const bool on_device = op == Op::scaled_mm || op == Op::grouped_mm;
  return op <= Op::addmv || attention || on_device || op == Op::convolution;
}

Named::Named(const SiteKey& key) : outer_(thread.name), outer_any_op_(thread.any_op) {
  thread.name = key;
  thread.any_op = false;
}
Named::Named(Role role) : Named(SiteKey{0, Op::mm, 0, role}) { thread.any_op = true; }
Named::~Named() {
  thread.name = outer_;
  thread.any_op = outer_any_op_;
}

NodeId current_node() { return thread.product; }

SiteKey current_site(Op op) {
  if (thread.name) {
    SiteKey key = *thread.name;
    if (thread.any_op) key.op = op;
    thread.product = {};
    return key;
  }
  drop_closed();
  // A module that was entered while this node is evaluated is recomputed by activation
  // checkpointing, so its products are forward products. A node without a sequence number
  // accumulates a gradient, and products in its hooks are forward products as well.
  const auto node = torch::autograd::get_current_node();
  const bool hook = node != nullptr && node->sequence_nr() == UINT64_MAX;
  const bool inside = !thread.modules.empty() && thread.modules.back().node == node.get();
  return node == nullptr || hook || inside ? forward_site(op) : backward_site(node, op);
}

void count_unverified(const SiteKey& key, const char* reason) {
  const std::lock_guard<std::mutex> lock(shared.mutex);
  SiteCounters& entry = counters_of(key);
  entry.unverified += 1;
  entry.reason = reason;
}

bool count_verified(const SiteKey& key, int64_t rows, int64_t suspects, const Durations& seconds) {
  const std::lock_guard<std::mutex> lock(shared.mutex);
  SiteCounters& entry = counters_of(key);
  entry.calls += 1;
  entry.rows += rows;
  entry.suspects += suspects;
  entry.seconds.encode += seconds.encode;
  entry.seconds.product += seconds.product;
  entry.seconds.verify += seconds.verify;
  return suspects == 0 && (entry.line == 0 || entry.calls % kCallsPerLine == 0);
}

void note_suspect(const SiteKey& key) {
  const std::lock_guard<std::mutex> lock(shared.mutex);
  counters_of(key).suspects += 1;
}

void note_line(const SiteKey& key, double line) {
  const std::lock_guard<std::mutex> lock(shared.mutex);
  counters_of(key).line = line;
}

uint32_t open_scope() {
  const std::lock_guard<std::mutex> lock(shared.mutex);
  return *shared.scopes.insert(++shared.last_scope).first;
}

void close_scope(uint32_t scope) {
  const std::lock_guard<std::mutex> lock(shared.mutex);
  if (shared.scopes.erase(scope) > 0) closings.fetch_add(1, std::memory_order_release);
}

void push_module(uint32_t module, uint32_t scope) {
  thread.modules.push_back({module, scope, torch::autograd::get_current_node().get()});
}
void pop_module(uint32_t module) {
  // An exception may have left modules inside this one without a call. A module that is not in the
  // list was never entered.
  auto& frames = thread.modules;
  const auto found = std::find_if(
      frames.rbegin(), frames.rend(), [&](const Frame& frame) { return frame.module == module; });
  if (found != frames.rend()) frames.erase(std::prev(found.base()), frames.end());
}

std::vector<SiteCounters> counters() {
  const std::lock_guard<std::mutex> lock(shared.mutex);
  std::vector<SiteCounters> all;
  all.reserve(shared.site_counters.size());
  for (const auto& [packed, entry] : shared.site_counters) all.push_back(entry);
  return all;
}

void reset_counters() {
  const std::lock_guard<std::mutex> lock(shared.mutex);
  shared.site_counters.clear();
}

}  // namespace holdfast
