// Position-mixing 128-bit digests in one pass over memory (holdfast/digest/README.md). Knows
// nothing of torch: processes without tensors use it, too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace holdfast::digest {

constexpr size_t kStripe = 64;  // bytes: a word of eight in each of eight lanes
constexpr size_t kLanes = 8;
constexpr size_t kBlock = 4096;  // bytes: what is summed before its place is mixed in
// Stripes that are copied as soon as they are summed: reading and writing overlap, and what is
// stored is read again, from the first-level cache, so that a load that went wrong shows.
constexpr size_t kPiece = 8;
constexpr size_t kKeys = 16 * (kBlock / kStripe + 1);  // 32 bits each

// Sums over all blocks so far.
struct Sums {
  uint64_t first = 0, second = 0;
};

// Adds the block number `place` of `stripes` stripes at `source`, which need not be aligned: over
// the stripes, products of keyed halves are summed in each lane, twice, with keys one stripe apart;
// these sums are mixed with their place. `target`, if there is one, gets a copy, past the caches,
// as it is not read again soon; a store fence must follow.
using Add =
    void (*)(const uint8_t* source, size_t stripes, uint64_t place, Sums& sums, uint8_t* target);

struct Kernels {
  Add add;
  const char* name;
};

extern const Kernels kernels_default;
#if defined(__x86_64__)
extern const Kernels kernels_avx2, kernels_avx512;
#endif

// What this processor runs, the widest first.
const std::vector<const Kernels*>& kernels();

const uint32_t* keys();

// Weyl steps that tell lanes and blocks apart; odd.
constexpr uint64_t kFirstStep = 0x9e3779b97f4a7c15, kSecondStep = 0xd1b54a32d192ed03;
constexpr uint64_t kMixOne = 0xff51afd7ed558ccd, kMixTwo = 0xc4ceb9fe1a85ec53;

// The finalizer of MurmurHash3: a bijection whose every output bit depends on every input bit.
constexpr uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 33)) * kMixOne;
  x = (x ^ (x >> 33)) * kMixTwo;
  return x ^ (x >> 33);
}

// Mixes the sums of a block's lanes with their place, one by one.
inline void add_lanes(const uint64_t* first, const uint64_t* second, uint64_t place, Sums& sums) {
  for (size_t lane = 0; lane < kLanes; ++lane) {
    const uint64_t at = place * kLanes + lane + 1;
    sums.first += mixed(first[lane] + at * kFirstStep);
    sums.second += mixed(second[lane] + at * kSecondStep);
  }
}

// Bytes in order, in pieces of any length.
class Hasher {
 public:
  explicit Hasher(const Kernels& use = *kernels().front()) : use_(&use) {}

  // `target`, if there is one, gets a copy of them.
  void update(const uint8_t* source, size_t nbytes, uint8_t* target = nullptr);
  // The two halves of the digest so far.
  Sums finish() const;

 private:
  const Kernels* use_;
  Sums sums_;
  uint64_t blocks_ = 0;
  size_t pending_ = 0;
  uint8_t rest_[kBlock];
};

}  // namespace holdfast::digest
