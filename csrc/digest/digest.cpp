#include "digest/digest.h"

#include <algorithm>
#include <array>
#include <cstring>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "core/instruction_sets.h"

namespace holdfast::digest {
namespace {

struct alignas(64) Keys {
  std::array<uint32_t, kKeys> values{};
};

constexpr Keys drawn() {
  Keys keys;
  for (size_t i = 0; i < kKeys; ++i) {
    keys.values[i] = static_cast<uint32_t>(mixed((i + 1) * kFirstStep) >> 32);
  }
  return keys;
}

constexpr Keys kDrawn = drawn();

void add_default(
    const uint8_t* source, size_t stripes, uint64_t place, Sums& sums, uint8_t* target) {
  if (target) std::memcpy(target, source, stripes * kStripe);
  const uint32_t* key = keys();
  uint64_t first[kLanes] = {}, second[kLanes] = {};
  for (size_t stripe = 0; stripe < stripes; ++stripe, source += kStripe, key += 16) {
    uint32_t words[16];
    std::memcpy(words, source, sizeof words);
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const uint32_t low = words[2 * lane], high = words[2 * lane + 1];
      const uint32_t *one = key + 2 * lane, *other = one + 16;
      first[lane] += static_cast<uint64_t>(low + one[0]) * (high + one[1]);
      second[lane] += static_cast<uint64_t>(low + other[0]) * (high + other[1]);
    }
  }
  add_lanes(first, second, place, sums);
}

template <typename T>
void sum_of(const void* block, size_t count, const double* signs, double* out, double* square) {
  *out = *square = 0;
  add_elements(static_cast<const T*>(block), 0, count, signs, *out, *square);
}

void sum_default(
    const void* block, size_t count, Element type, const double* signs, double* out,
    double* square) {
  by_type(type, [&](auto one) { sum_of<decltype(one)>(block, count, signs, out, square); });
}

// Makes stores that bypassed the caches visible before anything that is stored later.
void fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace

const uint32_t* keys() { return kDrawn.values.data(); }

const Kernels kernels_default{add_default, sum_default, "default"};

const std::vector<const Kernels*>& kernels() {
  static const std::vector<const Kernels*> runnable = [] {
    std::vector<const Kernels*> found;
    for (const Kernels* each : {HOLDFAST_SETS(kernels)}) {
      if (runs(each->name)) found.push_back(each);
    }
    return found;
  }();
  return runnable;
}

void Hasher::update(const uint8_t* source, size_t nbytes, uint8_t* target) {
  if (pending_ || nbytes < kBlock) {
    const size_t taken = std::min(nbytes, kBlock - pending_);
    if (taken) std::memcpy(rest_ + pending_, source, taken);
    if (target && taken) std::memcpy(target, source, taken);
    pending_ += taken;
    if (pending_ < kBlock) return;
    use_->add(rest_, kBlock / kStripe, blocks_++, sums_, nullptr);
    pending_ = 0;
    source += taken, nbytes -= taken;
    if (target) target += taken;
  }
  for (; nbytes >= kBlock; nbytes -= kBlock, source += kBlock) {
    use_->add(source, kBlock / kStripe, blocks_++, sums_, target);
    if (target) target += kBlock;
  }
  if (target) fence();
  if (nbytes) {
    std::memcpy(rest_, source, nbytes);
    if (target) std::memcpy(target, source, nbytes);
    pending_ = nbytes;
  }
}

Sums Hasher::finish() const {
  Sums sums = sums_;
  if (pending_) {
    const size_t stripes = (pending_ + kStripe - 1) / kStripe;
    uint8_t padded[kBlock];
    std::memcpy(padded, rest_, pending_);
    std::memset(padded + pending_, 0, stripes * kStripe - pending_);
    use_->add(padded, stripes, blocks_, sums, nullptr);
  }
  const uint64_t nbytes = blocks_ * kBlock + pending_;
  return {
      mixed(sums.first + (nbytes + 1) * kSecondStep),
      mixed(sums.second + (nbytes + 1) * kFirstStep),
  };
}

}  // namespace holdfast::digest
