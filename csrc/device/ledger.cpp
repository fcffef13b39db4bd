#include "device/ledger.h"

#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>

#include <mutex>
#include <unordered_map>

namespace holdfast::device {

namespace {

// Sites beyond them share the last slot, which is named as a product outside of any module: every
// model is concerned by its verdict.
constexpr int64_t kSlots = 1 << 14;

struct Ledger {
  at::Tensor values;  // int32 [kSlots]
  std::vector<SiteKey> sites;
  std::unordered_map<uint64_t, int64_t> slots;  // by SiteKey::packed()
  int64_t checks = 0;
  bool captured = false;
};

std::mutex mutex;  // It guards all ledgers.
auto& ledgers = *new std::unordered_map<c10::Device, Ledger>;  // never destroyed, as is the context

c10::Device indexed(const at::Device& device) {
  if (device.is_cpu() || device.has_index()) return device;
  return c10::impl::VirtualGuardImpl(device.type()).getDevice();
}

Ledger& known_ledger(const at::Device& device) {
  Ledger& ledger = ledgers[indexed(device)];
  if (!ledger.values.defined()) {
    const c10::InferenceMode off(false);  // as tensors made in it cannot be written outside of it
    ledger.values = at::zeros({kSlots}, at::TensorOptions().dtype(at::kInt).device(device));
  }
  return ledger;
}

}  // namespace

void prepare_ledger(const at::Device& device) {
  const std::lock_guard<std::mutex> lock(mutex);
  known_ledger(device);
}

at::Tensor slot_of(const SiteKey& key, const at::Device& device) {
  const std::lock_guard<std::mutex> lock(mutex);
  Ledger& ledger = known_ledger(device);
  const auto next = static_cast<int64_t>(ledger.sites.size());
  const auto [found, fresh] = ledger.slots.try_emplace(key.packed(), std::min(next, kSlots - 1));
  if (fresh && next < kSlots) ledger.sites.push_back(next == kSlots - 1 ? SiteKey{} : key);
  return ledger.values.narrow(0, found->second, 1);
}

std::pair<at::Tensor, std::vector<SiteKey>> ledger_of(const at::Device& device) {
  const std::lock_guard<std::mutex> lock(mutex);
  const Ledger& ledger = known_ledger(device);
  const auto used = static_cast<int64_t>(ledger.sites.size());
  return {ledger.values.narrow(0, 0, used), ledger.sites};
}

std::vector<c10::Device> ledger_devices() {
  const std::lock_guard<std::mutex> lock(mutex);
  std::vector<c10::Device> all;
  for (const auto& [device, ledger] : ledgers) all.push_back(device);
  return all;
}

std::pair<int64_t, bool> checks_queued(const at::Device& device) {
  const std::lock_guard<std::mutex> lock(mutex);
  const Ledger& ledger = known_ledger(device);
  return {ledger.checks, ledger.captured};
}

bool capturing(const at::Device& device) {
  if (device.is_cpu()) return false;
  const c10::impl::VirtualGuardImpl guard(device.type());
  return guard.isStreamCapturing(guard.getStream(device));
}

void note_check(const at::Device& device) {
  const bool captured = capturing(device);
  const std::lock_guard<std::mutex> lock(mutex);
  Ledger& ledger = known_ledger(device);
  ledger.checks += 1;
  ledger.captured |= captured;
}

}  // namespace holdfast::device
