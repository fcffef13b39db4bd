#include "core/checksum_weights.h"

#include <atomic>
#include <mutex>
#include <vector>

namespace holdfast {

namespace {

struct SignTable {
  std::vector<double> wide;
  std::vector<float> narrow;
  std::vector<uint16_t> bf16;
};

constexpr uint64_t kSignSeed = 8487194;  // checksums/weights.py gives the reason.

// Returns the top bit of the SplitMix64 hash of an index.
bool negative(uint64_t index) {
  uint64_t z = (index + (kSignSeed << 32) + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return (z ^ (z >> 31)) >> 63;
}

const SignTable* made(int64_t count) {
  auto* table = new SignTable;
  for (int64_t j = 0; j < count; ++j) {
    const bool minus = negative(static_cast<uint64_t>(j));
    table->wide.push_back(minus ? -1 : 1);
    table->narrow.push_back(minus ? -1.0f : 1.0f);
    table->bf16.push_back(minus ? 0xbf80 : 0x3f80);
  }
  return table;
}

}  // namespace

Weights sign_weights(int64_t count) {
  static std::atomic<const SignTable*> table{made(1 << 12)};
  static std::mutex growing;
  const SignTable* known = table.load(std::memory_order_acquire);
  if (static_cast<int64_t>(known->wide.size()) < count) {
    const std::lock_guard<std::mutex> lock(growing);
    known = table.load(std::memory_order_acquire);
    if (static_cast<int64_t>(known->wide.size()) < count) {
      known = made(2 * count);  // Smaller tables stay, as other threads may read them.
      table.store(known, std::memory_order_release);
    }
  }
  Weights weights;
  weights.wide = known->wide.data();
  weights.narrow = known->narrow.data();
  weights.high = known->bf16.data();
  return weights;
}

FastWeights::FastWeights(const double* weights, int64_t count, Element element) {
  weights_.wide = weights;
  if (element == Element::f64) return;
  memory_.reset(new float[static_cast<size_t>(2 * count)]);  // The last half is for two bf16 each.
  auto* high =
      element == Element::bf16 ? reinterpret_cast<uint16_t*>(memory_.get() + count) : nullptr;
  auto* low = high == nullptr ? nullptr : high + count;
  reductions().narrow(weights, count, memory_.get(), high, low);
  weights_.narrow = memory_.get();
  weights_.high = high;
  weights_.low = low;
}

}  // namespace holdfast
