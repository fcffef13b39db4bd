// Digests of 128 bits that depend on the position of every byte, from one pass over memory
// (holdfast/digest/README.md). They do without torch, as processes without tensors use them as
// well.
#pragma once

#include <vector>

#include "digest/blocks.h"

namespace holdfast::digest {

// Returns the kernels that this processor runs, the widest first.
const std::vector<const Kernels*>& kernels();

// Takes in bytes in order, in pieces of any length.
class Hasher {
 public:
  explicit Hasher(const Kernels& use = *kernels().front()) : use_(&use) {}

  // `target`, unless it is null, gets a copy of the bytes.
  void update(const uint8_t* source, size_t nbytes, uint8_t* target = nullptr);
  // Returns the two halves of the digest of all bytes so far.
  Sums finish() const;

 private:
  const Kernels* use_;
  Sums sums_;
  uint64_t blocks_ = 0;
  size_t pending_ = 0;
  uint8_t rest_[kBlock];
};

}  // namespace holdfast::digest
