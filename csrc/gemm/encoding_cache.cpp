#include "gemm/encoding_cache.h"

#include <ATen/ops/equal.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <deque>
#include <mutex>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "core/interception_state.h"
#include "gemm/encode.h"

namespace holdfast {

namespace {

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;  // addresses may be reused

// Work of other streams is not ordered behind what this one computed.
int64_t stream_of(const at::Tensor& t) {
  if (t.is_cpu()) return 0;
  return c10::impl::VirtualGuardImpl(t.device().type()).getStream(t.device()).id();
}

// The encoding of one view of a storage at one version of it, by one stream of its device.
struct Entry {
  Entry(const at::Tensor& b, uint32_t version, Encoding encoding)
      : data(b.const_data_ptr()),
        type(b.scalar_type()),
        sizes(b.sizes().vec()),
        strides(b.strides().vec()),
        version(version),
        stream(stream_of(b)),
        encoding(std::move(encoding)) {}
  bool same_view(const at::Tensor& b) const {
    return same_memory(b) && b.sizes() == sizes && b.strides() == strides;
  }
  bool transposed_view(const at::Tensor& b) const {
    return sizes.size() == 2 && b.dim() == 2 && same_memory(b) && turned(b.sizes(), sizes) &&
        turned(b.strides(), strides);
  }
  bool same_memory(const at::Tensor& b) const {
    return data == b.const_data_ptr() && type == b.scalar_type() && stream == stream_of(b);
  }
  static bool turned(at::IntArrayRef one, const std::vector<int64_t>& other) {
    return one[0] == other[1] && one[1] == other[0];
  }
  const void* data;
  at::ScalarType type;
  std::vector<int64_t> sizes, strides;
  uint32_t version;
  int64_t stream;
  Encoding encoding;
  Encoding copy;  // Undefined if there is none.
};

struct Weight {
  WeakStorage storage;
  std::vector<c10::VariableVersion> counters;  // shared with the watched tensors
  int watchers = 0;
  std::vector<Entry> entries;  // one for each view in use, e.g. W and its transpose
  std::vector<Entry> in_both;  // without encodings: views of which the transpose was used as well
};

struct Activation {
  WeakStorage storage;
  Entry entry;
  NodeId product;  // the autograd node of the product that read it
  std::optional<Encoding> of_weight;
};

constexpr size_t kViewsPerWeight = 8;
constexpr size_t kActivations = 512;  // kept at most; the others are encoded again in backward

std::mutex mutex;
auto& weights = *new std::unordered_map<const c10::StorageImpl*, Weight>;
auto& activations = *new std::deque<Activation>;  // in order of their products

const c10::StorageImpl* storage_of(const at::Tensor& t) {
  return t.storage().unsafeGetStorageImpl();
}

Weight* watched(const at::Tensor& b) {
  const auto found = weights.find(storage_of(b));
  if (found == weights.end()) return nullptr;
  if (found->second.storage.expired()) {
    weights.erase(found);
    return nullptr;
  }
  return &found->second;
}

// Removes weights that were freed or got new memory while they were watched.
void sweep() {
  for (auto it = weights.begin(); it != weights.end();) {
    it = it->second.storage.expired() ? weights.erase(it) : std::next(it);
  }
}

// Returns true if a version is that of a watched tensor; an alias made by .data has its own
// counter.
bool current(const Weight& weight, uint32_t version) {
  return std::any_of(weight.counters.begin(), weight.counters.end(), [&](const auto& counter) {
    return counter.enabled() && counter.current_version() == version;
  });
}

// Returns the version to which b's encoding belongs. Views made by compiled code have a counter of
// their own or none; for them it is the weight's version, if the storage has only one counter.
std::optional<uint32_t> version_of(const at::Tensor& b, bool in_compiled_backward = false) {
  if (current_node() == NodeId{} || in_compiled_backward) {
    const std::lock_guard<std::mutex> lock(mutex);
    const Weight* weight = watched(b);
    if (weight != nullptr && weight->counters.size() == 1 && weight->counters[0].enabled()) {
      return weight->counters[0].current_version();
    }
  }
  const auto& counter = b.unsafeGetTensorImpl()->version_counter();
  return counter.enabled() ? std::optional(counter.current_version()) : std::nullopt;
}

std::optional<Encoding> cached(const at::Tensor& b, uint32_t version) {
  const std::lock_guard<std::mutex> lock(mutex);
  const Weight* weight = watched(b);
  if (weight == nullptr || !current(*weight, version)) return std::nullopt;
  for (const Entry& entry : weight->entries) {
    if (entry.version == version && entry.same_view(b)) return entry.encoding;
  }
  return std::nullopt;
}

bool same_bits(const at::Tensor& one, const at::Tensor& other) {
  return at::equal(one.view(at::kByte), other.view(at::kByte));
}

bool damaged(const Entry& entry) {
  const Encoding& copy = entry.copy;
  return copy.row_sum.defined() &&
      !(same_bits(copy.row_sum, entry.encoding.row_sum) &&
        same_bits(copy.statistics, entry.encoding.statistics));
}

bool any_same(const std::vector<Entry>& entries, const at::Tensor& b) {
  return std::any_of(
      entries.begin(), entries.end(), [&](const Entry& e) { return e.same_view(b); });
}

bool any_transposed(const std::vector<Entry>& entries, const at::Tensor& b) {
  return std::any_of(
      entries.begin(), entries.end(), [&](const Entry& e) { return e.transposed_view(b); });
}

// Returns true if a weight was once used in both directions, and neither is kept of this version.
bool wanted_in_both(const at::Tensor& b, uint32_t version) {
  const std::lock_guard<std::mutex> lock(mutex);
  const Weight* weight = watched(b);
  if (b.dim() != 2 || weight == nullptr || !current(*weight, version)) return false;
  const bool used = any_same(weight->in_both, b) || any_transposed(weight->in_both, b);
  const auto same = [&](const Entry& e) { return e.version == version && e.transposed_view(b); };
  return used && std::none_of(weight->entries.begin(), weight->entries.end(), same);
}

void store(const at::Tensor& b, uint32_t version, EncodedTwice made) {
  const std::lock_guard<std::mutex> lock(mutex);
  Weight* weight = watched(b);
  if (weight == nullptr || !current(*weight, version)) return;
  auto& entries = weight->entries;
  const auto stale = [&](const Entry& e) { return e.version != version || e.same_view(b); };
  entries.erase(std::remove_if(entries.begin(), entries.end(), stale), entries.end());
  if (entries.size() >= kViewsPerWeight) entries.erase(entries.begin());
  if (any_transposed(entries, b) && !any_same(weight->in_both, b)) {
    if (weight->in_both.size() >= kViewsPerWeight) weight->in_both.clear();
    weight->in_both.emplace_back(b, version, Encoding{});
  }
  entries.emplace_back(b, version, std::move(made.encoding));
  entries.back().copy = std::move(made.copy);
}

// Removes and returns an activation's encoding, which only the product of its gradient uses.
std::optional<KnownEncoding> taken_activation(
    const at::Tensor& b, uint32_t version, const NodeId& product) {
  const std::lock_guard<std::mutex> lock(mutex);
  for (auto it = activations.rbegin(); it != activations.rend(); ++it) {
    if (!(it->product == product)) continue;
    if (it->entry.version != version || !it->entry.same_view(b) || it->storage.expired()) continue;
    KnownEncoding known{std::move(it->entry.encoding), true, false, std::move(it->of_weight)};
    activations.erase(std::next(it).base());
    return known;
  }
  return std::nullopt;
}

// Returns what is kept of B at a version of it.
std::optional<KnownEncoding> kept(const at::Tensor& b, uint32_t version, Role role) {
  if (auto known = cached(b, version)) return KnownEncoding{*std::move(known), true, false};
  if (role != Role::grad_b) return std::nullopt;
  return taken_activation(b, version, current_node());
}

}  // namespace

KnownEncoding encoding_of(
    const at::Tensor& b, Role role, const OperandEncoder& encoder, bool captured) {
  const auto version = version_of(b, in_compiled_code());
  if (captured && version && role == Role::grad_b) {
    if (auto known = taken_activation(b, *version, current_node())) {
      return {known->encoding, true, false};
    }
  }
  if (!version || captured) return {encoder.one(b).encoding, false, false};
  auto known = kept(b, *version, role);
  const bool damaged = known && encoder.intact != nullptr && !encoder.intact(known->encoding);
  if (known && !damaged) return *std::move(known);
  EncodedTwice own;
  if (wanted_in_both(b, *version)) {
    EncodedTwice other;
    std::tie(own, other) = encoder.both(b);
    store(b.t(), *version, std::move(other));
  } else {
    own = encoder.one(b);
  }
  store(b, *version, own);
  return {std::move(own.encoding), false, damaged};
}

KnownEncoding encoding_of(const at::Tensor& b, Role role) {
  static const OperandEncoder& encoder = *new OperandEncoder{
      [](const at::Tensor& one) { return EncodedTwice{encode(one)}; },
      [](const at::Tensor& one) {
        auto [own, other] = encode_both(one);
        return std::pair<EncodedTwice, EncodedTwice>({std::move(own)}, {std::move(other)});
      },
      intact};
  return encoding_of(b, role, encoder);
}

void keep_activation(
    const at::Tensor& a, const Encoding& encoding, std::optional<Encoding> of_weight) {
  if (current_node() == NodeId{}) return;  // without an autograd node it could not be found again
  const auto& counter = a.unsafeGetTensorImpl()->version_counter();
  if (!counter.enabled()) return;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto gone = [](const Activation& each) { return each.storage.expired(); };
  if (activations.size() >= kActivations) {
    activations.erase(
        std::remove_if(activations.begin(), activations.end(), gone), activations.end());
  }
  if (activations.size() >= kActivations) activations.pop_front();
  activations.push_back(
      {a.storage().getWeakStorageImpl(),
       {a, counter.current_version(), encoding},
       current_node(),
       std::move(of_weight)});
}

std::optional<Encoding> kept_of_transpose(const at::Tensor& b) {
  const auto version = version_of(b);  // a view made here has a version of its own
  return version ? cached(b.t(), *version) : std::nullopt;
}

std::optional<Encoding> activation_beside() {
  const NodeId product = current_node();
  const std::lock_guard<std::mutex> lock(mutex);
  for (auto it = activations.rbegin(); it != activations.rend(); ++it) {
    if (it->product == product) return it->entry.encoding;
  }
  return std::nullopt;
}

std::vector<uintptr_t> watch(const std::vector<at::Tensor>& tensors) {
  const std::lock_guard<std::mutex> lock(mutex);
  std::vector<uintptr_t> keys;
  for (const at::Tensor& t : tensors) {
    if (!t.has_storage()) continue;  // sparse and wrapper tensors, which no dense GEMM reads
    const auto pointer = storage_of(t);
    const auto found = weights.find(pointer);
    if (found != weights.end() && found->second.storage.expired()) weights.erase(found);
    Weight fresh{t.storage().getWeakStorageImpl(), {}, 0, {}, {}};
    Weight& weight = weights.try_emplace(pointer, std::move(fresh)).first->second;
    weight.counters.push_back(t.unsafeGetTensorImpl()->version_counter());
    weight.watchers += 1;
    keys.push_back(reinterpret_cast<uintptr_t>(pointer));
  }
  return keys;
}

void unwatch(const std::vector<uintptr_t>& keys) {
  const std::lock_guard<std::mutex> lock(mutex);
  for (const uintptr_t key : keys) {
    const auto found = weights.find(reinterpret_cast<const c10::StorageImpl*>(key));
    if (found != weights.end() && --found->second.watchers == 0) weights.erase(found);
  }
  sweep();
}

void forget(const at::Tensor& weight) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (Weight* known = watched(weight)) known->entries.clear();
}

void forget_all() {
  const std::lock_guard<std::mutex> lock(mutex);
  for (auto& [pointer, weight] : weights) weight.entries.clear();
  activations.clear();
}

int64_t drop_damaged() {
  const std::lock_guard<std::mutex> lock(mutex);
  int64_t dropped = 0;
  for (auto& [pointer, weight] : weights) {
    dropped += static_cast<int64_t>(std::erase_if(weight.entries, damaged));
  }
  return dropped;
}

int64_t cached_encodings() {
  const std::lock_guard<std::mutex> lock(mutex);
  sweep();
  int64_t total = 0;
  for (const auto& [pointer, weight] : weights)
    total += static_cast<int64_t>(weight.entries.size());
  return total;
}

}  // namespace holdfast
