#include "sites.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <unordered_map>

namespace holdfast {

namespace {

constexpr size_t kOps = 9;
constexpr uint16_t kLastOrdinal = 999;  // loops inside one module share the last name
constexpr int64_t kCallsPerLine = 64;
constexpr uint64_t kForwardSites = 1 << 16;

// Sequence numbers of autograd nodes count per thread.
struct NodeId {
  uint64_t thread = 0, sequence = ~uint64_t{0};
  bool operator==(const NodeId& other) const {
    return thread == other.thread && sequence == other.sequence;
  }
  size_t slot() const { return (sequence + thread * 4099) % kForwardSites; }
};

struct Frame {
  uint32_t module;
  const void* node;  // the autograd node under evaluation when the module was entered
  std::array<uint16_t, kOps> calls{};
};

// Which forward site made an autograd node.
struct ForwardSite {
  NodeId node;
  SiteKey key;
};

struct ThreadState {
  std::vector<Frame> modules;
  NodeId node;
  unsigned node_calls = 0;
};
thread_local ThreadState thread;

struct Shared {
  std::mutex mutex;  // guards everything below
  std::unordered_map<uint64_t, SiteCounters> site_counters;
  std::vector<ForwardSite> forward_sites;
};
Shared& shared = *new Shared;  // never destroyed: threads may outlive the program's end

SiteKey forward_site(Op op) {
  SiteKey key{0, op, 0, Role::forward};
  if (!thread.modules.empty()) {
    Frame& frame = thread.modules.back();
    uint16_t& calls = frame.calls[static_cast<size_t>(op)];
    key.module = frame.module;
    key.ordinal = calls;
    if (calls < kLastOrdinal) ++calls;
  }
  // The autograd node of this op was made just before its kernel was called. An op that makes none
  // finds the node of an earlier op there, which must keep its name: the first one stays.
  const NodeId node{at::RecordFunction::currentThreadId(), at::sequence_number::peek() - 1};
  const std::lock_guard<std::mutex> lock(shared.mutex);
  if (shared.forward_sites.empty()) shared.forward_sites.resize(kForwardSites);
  ForwardSite& site = shared.forward_sites[node.slot()];
  if (!(site.node == node)) site = {node, key};
  return key;
}

template <typename Node>
SiteKey backward_site(const Node& node, Op op) {
  const NodeId id{node->thread_id(), node->sequence_nr()};
  thread.node_calls = id == thread.node ? thread.node_calls + 1 : 0;
  thread.node = id;
  SiteKey key{0, op, 0, Role::forward};
  {
    const std::lock_guard<std::mutex> lock(shared.mutex);
    if (!shared.forward_sites.empty()) {
      const ForwardSite& site = shared.forward_sites[id.slot()];
      if (site.node == id) key = site.key;
    }
  }
  // mm and bmm take (a, b); addmm and baddbmm take (addend, a, b).
  const auto edges = node->num_outputs();
  const bool a = edges >= 2 && node->task_should_compute_output(edges - 2);
  const bool b = edges >= 2 && node->task_should_compute_output(edges - 1);
  // torch differentiates mm and bmm by b first, addmm and baddbmm by a first.
  const bool b_now = (thread.node_calls % 2 == 1) != (edges == 2);
  key.role = (a && b ? b_now : b) ? Role::grad_b : Role::grad_a;
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
      "mm", "addmm", "bmm", "baddbmm", "addmv", "dot", "_addmm_activation",
      "_scaled_dot_product_flash_attention_for_cpu",
      "_scaled_dot_product_flash_attention_for_cpu_backward"};
  return names[static_cast<size_t>(op)];
}

bool covered(Op op) { return op <= Op::baddbmm; }

SiteKey current_site(Op op) {
  // A module entered while this node is evaluated is recomputed (checkpointing): that is forward.
  const auto node = torch::autograd::get_current_node();
  const bool inside = !thread.modules.empty() && thread.modules.back().node == node.get();
  return node == nullptr || inside ? forward_site(op) : backward_site(node, op);
}

void count_unverified(const SiteKey& key, const char* reason) {
  const std::lock_guard<std::mutex> lock(shared.mutex);
  SiteCounters& entry = counters_of(key);
  entry.unverified += 1;
  entry.reason = reason;
}

bool count_verified(
    const SiteKey& key, int64_t rows, int64_t suspects, const Durations& seconds) {
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

void note_line(const SiteKey& key, double line) {
  const std::lock_guard<std::mutex> lock(shared.mutex);
  counters_of(key).line = line;
}

void push_module(uint32_t module) {
  thread.modules.push_back({module, torch::autograd::get_current_node().get()});
}
void pop_module(uint32_t module) {
  // Frames above it were left by an interrupt; without a frame of its own it was never entered.
  auto& frames = thread.modules;
  const auto found = std::find_if(
      frames.rbegin(), frames.rend(), [&](const Frame& frame) { return frame.module == module; });
  if (found != frames.rend()) frames.erase(std::prev(found.base()), frames.end());
}
void clear_modules() { thread.modules.clear(); }

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
