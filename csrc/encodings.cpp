#include "encodings.h"

#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <deque>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

namespace holdfast {

namespace {

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;  // an address alone may be reused

// The encoding of one view of a storage at one version of it.
struct Entry {
  Entry(const at::Tensor& b, uint32_t version, Encoding encoding)
      : data(b.const_data_ptr()),
        type(b.scalar_type()),
        sizes(b.sizes().vec()),
        strides(b.strides().vec()),
        version(version),
        encoding(std::move(encoding)) {}
  bool same_view(const at::Tensor& b) const {
    return data == b.const_data_ptr() && type == b.scalar_type() && b.sizes() == sizes &&
        b.strides() == strides;
  }
  const void* data;
  at::ScalarType type;
  std::vector<int64_t> sizes, strides;
  uint32_t version;
  Encoding encoding;
};

struct Weight {
  WeakStorage storage;
  int watchers = 0;
  std::vector<Entry> entries;  // one for each view in use, e.g. W and its transpose
};

struct Activation {
  WeakStorage storage;
  Entry entry;
  const void* partner;  // of the weight it was multiplied by
};

constexpr size_t kViewsPerWeight = 8;
constexpr size_t kActivations = 512;  // of one forward pass; more are encoded again in backward

std::mutex mutex;
auto& weights = *new std::unordered_map<const c10::StorageImpl*, Weight>;
auto& activations = *new std::deque<Activation>;  // the latest last

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

// Weights that were freed or given new memory while watched.
void sweep() {
  for (auto it = weights.begin(); it != weights.end();) {
    it = it->second.storage.expired() ? weights.erase(it) : std::next(it);
  }
}

std::optional<Encoding> cached(const at::Tensor& b, uint32_t version) {
  const std::lock_guard<std::mutex> lock(mutex);
  const Weight* weight = watched(b);
  if (weight == nullptr) return std::nullopt;
  for (const Entry& entry : weight->entries) {
    if (entry.version == version && entry.same_view(b)) return entry.encoding;
  }
  return std::nullopt;
}

void store(const at::Tensor& b, uint32_t version, const Encoding& encoding) {
  const std::lock_guard<std::mutex> lock(mutex);
  Weight* weight = watched(b);
  if (weight == nullptr) return;
  auto& entries = weight->entries;
  const auto stale = [&](const Entry& e) { return e.version != version || e.same_view(b); };
  entries.erase(std::remove_if(entries.begin(), entries.end(), stale), entries.end());
  if (entries.size() >= kViewsPerWeight) entries.erase(entries.begin());
  entries.emplace_back(b, version, encoding);
}

// Each is used once, by the product of its gradient.
std::optional<Encoding> taken_activation(const at::Tensor& b, uint32_t version) {
  const std::lock_guard<std::mutex> lock(mutex);
  for (auto it = activations.rbegin(); it != activations.rend(); ++it) {
    if (it->entry.version != version || !it->entry.same_view(b) || it->storage.expired()) continue;
    Encoding encoding = std::move(it->entry.encoding);
    activations.erase(std::next(it).base());
    return encoding;
  }
  return std::nullopt;
}

}  // namespace

KnownEncoding encoding_of(const at::Tensor& b) {
  const auto& counter = b.unsafeGetTensorImpl()->version_counter();
  if (!counter.enabled()) return {encode(b), false, false};
  const uint32_t version = counter.current_version();
  auto known = cached(b, version);
  if (!known) known = taken_activation(b, version);
  if (known && intact(*known)) return {*std::move(known), true, false};
  const Encoding encoding = encode(b);
  store(b, version, encoding);
  return {encoding, false, known.has_value()};
}

void keep_activation(const at::Tensor& a, const Encoding& encoding, const void* partner) {
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
      {a.storage().getWeakStorageImpl(), {a, counter.current_version(), encoding}, partner});
}

std::optional<Encoding> activation_beside(const void* partner, int64_t rows) {
  const std::lock_guard<std::mutex> lock(mutex);
  for (auto it = activations.rbegin(); it != activations.rend(); ++it) {
    const Encoding& encoding = it->entry.encoding;
    if (it->partner == partner && encoding.row_sum.size(1) == rows) return encoding;
  }
  return std::nullopt;
}

void watch(const std::vector<at::Tensor>& tensors) {
  const std::lock_guard<std::mutex> lock(mutex);
  for (const at::Tensor& t : tensors) {
    if (!t.has_storage()) continue;  // sparse and wrapper tensors have none, and no dense GEMM
    const auto pointer = storage_of(t);
    const auto found = weights.find(pointer);
    if (found != weights.end() && !found->second.storage.expired()) {
      found->second.watchers += 1;
      continue;
    }
    if (found != weights.end()) weights.erase(found);
    weights.emplace(pointer, Weight{t.storage().getWeakStorageImpl(), 1, {}});
  }
}

void unwatch(const std::vector<at::Tensor>& tensors) {
  const std::lock_guard<std::mutex> lock(mutex);
  for (const at::Tensor& t : tensors) {
    if (!t.has_storage()) continue;
    const auto found = weights.find(storage_of(t));
    if (found != weights.end() && --found->second.watchers == 0) weights.erase(found);
  }
  sweep();
}

void forget(const at::Tensor& weight) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (Weight* known = watched(weight)) known->entries.clear();
}

int64_t cached_encodings() {
  const std::lock_guard<std::mutex> lock(mutex);
  sweep();
  int64_t total = 0;
  for (const auto& [pointer, weight] : weights) total += static_cast<int64_t>(weight.entries.size());
  return total;
}

}  // namespace holdfast
