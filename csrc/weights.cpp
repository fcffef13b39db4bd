#include "weights.h"

#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

namespace holdfast {

namespace {

struct Entry {
  const void* data;
  at::ScalarType type;
  std::vector<int64_t> sizes, strides;
  uint32_t version;
  Encoding encoding;
};

struct Weight {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // an address alone may be reused
  int watchers = 0;
  std::vector<Entry> entries;  // one for each view in use, e.g. W and its transpose
};

constexpr size_t kViewsPerWeight = 8;

std::mutex mutex;
auto& weights = *new std::unordered_map<const c10::StorageImpl*, Weight>;

const c10::StorageImpl* storage_of(const at::Tensor& t) {
  return t.storage().unsafeGetStorageImpl();
}

bool same_view(const Entry& entry, const at::Tensor& b) {
  return entry.data == b.const_data_ptr() && entry.type == b.scalar_type() &&
      b.sizes() == at::IntArrayRef(entry.sizes) &&
      b.strides() == at::IntArrayRef(entry.strides);
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
    if (entry.version == version && same_view(entry, b)) return entry.encoding;
  }
  return std::nullopt;
}

void store(const at::Tensor& b, uint32_t version, const Encoding& encoding) {
  const std::lock_guard<std::mutex> lock(mutex);
  Weight* weight = watched(b);
  if (weight == nullptr) return;
  auto& entries = weight->entries;
  const auto stale = [&](const Entry& e) { return e.version != version || same_view(e, b); };
  entries.erase(std::remove_if(entries.begin(), entries.end(), stale), entries.end());
  if (entries.size() >= kViewsPerWeight) entries.erase(entries.begin());
  entries.push_back(
      {b.const_data_ptr(), b.scalar_type(), b.sizes().vec(), b.strides().vec(), version, encoding});
}

}  // namespace

KnownEncoding encoding_of(const at::Tensor& b) {
  const auto& counter = b.unsafeGetTensorImpl()->version_counter();
  if (!counter.enabled()) return {encode(b), false, false};
  const uint32_t version = counter.current_version();
  auto known = cached(b, version);
  if (known && intact(*known)) return {*std::move(known), true, false};
  const Encoding encoding = encode(b);
  store(b, version, encoding);
  return {encoding, false, known.has_value()};
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
