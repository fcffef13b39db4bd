// The sums over one block of bytes, from which a digest is made (holdfast/digest/README.md).
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/reduce.h"

namespace holdfast::digest {

constexpr size_t kStripe = 64;  // In bytes: one 8-byte word for each of the eight lanes.
constexpr size_t kLanes = 8;
constexpr size_t kBlock = 4096;  // In bytes. The place of each block is mixed into its sums.
// So many stripes are summed and then copied. Reading and writing overlap, and the copy reads the
// bytes again from the first-level cache, so that a wrong load makes copy and digest differ.
constexpr size_t kPiece = 8;
constexpr size_t kKeys = 16 * (kBlock / kStripe + 1);  // Each has 32 bits.

// The sums over all blocks so far.
struct Sums {
  uint64_t first = 0, second = 0;
};

// Adds the block with the number `place`, which has `stripes` stripes at `source`, to `sums`. In
// each word a key is added to both halves and their product is summed in the word's lane; this is
// done twice, with keys one stripe apart. Then each lane's sum is mixed with its place. `source`
// need not be aligned. `target`, unless it is null, gets a copy that bypasses the caches, as it is
// not read again soon; the caller must execute a store fence afterwards.
using Add =
    void (*)(const uint8_t* source, size_t stripes, uint64_t place, Sums& sums, uint8_t* target);

// Writes the signed sum of `count` elements, Σ signs_i x_i, and the sum of their squares, both in
// fp64. Elements of fp16 are converted by the caller.
using Sum = void (*)(
    const void* block, size_t count, Element type, const double* signs, double* signed_sum,
    double* square);

struct Kernels {
  Add add;
  Sum sum;
  const char* name;
};

extern const Kernels kernels_default, kernels_avx2, kernels_avx512;

const uint32_t* keys();

// Odd multipliers that give each lane of each block another offset.
constexpr uint64_t kFirstStep = 0x9e3779b97f4a7c15, kSecondStep = 0xd1b54a32d192ed03;
constexpr uint64_t kMixOne = 0xff51afd7ed558ccd, kMixTwo = 0xc4ceb9fe1a85ec53;

namespace {  // Compiled for several instruction sets: the linker must not choose one of them.

// The finalizer of MurmurHash3. It is a bijection, and every bit of its result depends on every bit
// of x.
template <typename Word>
constexpr Word mixed(Word x) {
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

// Calls a function with a value of the type in which the elements are read.
template <typename Function>
void by_type(Element type, Function function) {
  switch (type) {
    case Element::f64: return function(double{});
    case Element::f32: return function(float{});
    default: return function(uint16_t{});
  }
}

inline double widened(double x) { return x; }
inline double widened(float x) { return x; }
inline double widened(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

// Adds the elements from `first` on, one by one.
template <typename T>
inline void add_elements(
    const T* x, size_t first, size_t count, const double* signs, double& sum, double& square) {
  for (size_t i = first; i < count; ++i) {
    const double value = widened(x[i]);
    sum += signs[i] * value;
    square += value * value;
  }
}

}  // namespace
}  // namespace holdfast::digest
