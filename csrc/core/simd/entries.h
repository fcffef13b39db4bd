// Passes over the fp64 entries of an encoding, which every check of a kept weight makes. Included
// by core/simd/kernels.h.

namespace holdfast {
namespace {

typedef double EntryDoubles __attribute__((vector_size(kBytes)));
typedef uint64_t EntryWords __attribute__((vector_size(kBytes)));
constexpr int64_t kEntries = kBytes / sizeof(double);

// The exclusive or of the terms of the fingerprint, as checksums/rows.py computes them.
uint64_t mixed(const double* entries, int64_t count, int64_t position) {
  constexpr uint64_t kTurn = 0x9E3779B97F4A7C15u, kSpread = 0xD6E8FEB86659FD93u;
  EntryWords turn, mixes{};
  for (int64_t l = 0; l < kEntries; ++l) turn[l] = static_cast<uint64_t>(position + l) * kTurn;
  int64_t k = 0;
  for (; k + kEntries <= count; k += kEntries, turn += kEntries * kTurn) {
    const EntryWords product = (raw<EntryWords>(entries + k) ^ turn) * kSpread;
    mixes ^= product ^ product >> 32;
  }
  uint64_t mix = 0;
  for (int64_t l = 0; l < kEntries; ++l) mix ^= mixes[l];
  for (int64_t l = 0; k < count; ++k, ++l) {
    const uint64_t product = (raw<uint64_t>(entries + k) ^ turn[l]) * kSpread;
    mix ^= product ^ product >> 32;
  }
  return mix;
}

// The smallest of at least one entry. A NaN that is not the first counts as none.
double smallest(const double* entries, int64_t count) {
  double least = entries[0];
  EntryDoubles leasts = EntryDoubles{} + least;
  int64_t k = 0;
  for (; k + kEntries <= count; k += kEntries) {
    const EntryDoubles of = raw<EntryDoubles>(entries + k);
    leasts = of < leasts ? of : leasts;
  }
  for (int64_t l = 0; l < kEntries; ++l) least = leasts[l] < least ? leasts[l] : least;
  for (; k < count; ++k) least = entries[k] < least ? entries[k] : least;
  return least;
}

// See Reductions.
void narrow(
    const double* __restrict wide, int64_t count, float* __restrict to, uint16_t* __restrict high,
    uint16_t* __restrict low) {
  for (int64_t k = 0; k < count; ++k) to[k] = static_cast<float>(wide[k]);
  if (high == nullptr) return;
  for (int64_t k = 0; k < count; ++k) {
    // The weight is truncated, so that the rest has the same sign and both together hold 16 bits.
    const uint32_t bits = raw<uint32_t>(to + k) & 0xffff0000u;
    const float rest = to[k] - raw<float>(&bits);
    high[k] = static_cast<uint16_t>(bits >> 16);
    low[k] = static_cast<uint16_t>(raw<uint32_t>(&rest) >> 16);
  }
}

}  // namespace
}  // namespace holdfast
