#include "core/checksum_weights.h"

#include <atomic>
#include <cstring>
#include <mutex>

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

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
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

FastWeights::FastWeights(const double* weights, int64_t count, Element element) : wide_(weights) {
  if (element == Element::f64) return;
  narrow_.resize(static_cast<size_t>(count));
  for (int64_t k = 0; k < count; ++k) narrow_[k] = static_cast<float>(weights[k]);
  if (element != Element::bf16) return;
  high_.resize(narrow_.size());
  low_.resize(narrow_.size());
  for (int64_t k = 0; k < count; ++k) {
    // The weight is truncated, so that the rest has the same sign and both together hold 16 bits.
    const uint32_t high = bits_of(narrow_[k]) & 0xffff0000u;
    high_[k] = static_cast<uint16_t>(high >> 16);
    low_[k] = static_cast<uint16_t>(bits_of(narrow_[k] - float_of(high)) >> 16);
  }
}

Weights FastWeights::view() const {
  Weights weights;
  weights.wide = wide_;
  weights.narrow = narrow_.data();
  if (!high_.empty()) {
    weights.high = high_.data();
    weights.low = low_.data();
  }
  return weights;
}

}  // namespace holdfast
