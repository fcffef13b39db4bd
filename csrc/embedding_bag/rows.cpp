// Computes and checks a row's checksums, and uses them to repair one damaged byte.
#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

#include "embedding_bag/rows.h"

namespace holdfast {

namespace {

constexpr uint32_t kCastagnoli = 0x82f63b78u;

using CrcTable = std::array<uint32_t, 256>;

CrcTable make_table() {
  CrcTable table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? kCastagnoli : 0);
    table[byte] = crc;
  }
  return table;
}

const CrcTable kTable = make_table();

uint32_t crc_by_table(uint32_t crc, const uint8_t* bytes, int64_t count) {
  for (int64_t i = 0; i < count; ++i) crc = (crc >> 8) ^ kTable[(crc ^ bytes[i]) & 255];
  return crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t
crc_by_instruction(uint32_t crc, const uint8_t* bytes, int64_t count) {
  uint64_t wide = crc;
  for (; count >= 8; count -= 8, bytes += 8) {
    uint64_t word;
    std::memcpy(&word, bytes, 8);
    wide = _mm_crc32_u64(wide, word);
  }
  crc = static_cast<uint32_t>(wide);
  for (; count > 0; --count) crc = _mm_crc32_u8(crc, *bytes++);
  return crc;
}
#endif

// Draws the sign of a column by SplitMix64 of its number.
bool positive(uint64_t column) {
  uint64_t z = (column + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return ((z ^ (z >> 31)) & 1) != 0;
}

// The sign pattern, and a second one with its first sign changed, for lengths whose sum would be 0.
struct Pattern {
  std::vector<float> values[2];
  std::vector<int32_t> sums{0};
};

Pattern make_pattern() {
  Pattern pattern;
  for (int64_t j = 0; j < kMaxDim; ++j) {
    const int sign = positive(static_cast<uint64_t>(j)) ? 1 : -1;
    pattern.values[0].push_back(static_cast<float>(sign));
    pattern.values[1].push_back(static_cast<float>(j == 0 ? -sign : sign));
    pattern.sums.push_back(pattern.sums.back() + sign);
  }
  return pattern;
}

template <typename T>
T read(const uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

uint8_t* row_of(const RowTable& t, int64_t row) { return t.data + row * t.stride; }

uint32_t sum_of_codes(const RowTable& t, const uint8_t* row) {
  int32_t sum = 0;
  for (int64_t j = 0; j < t.dim; ++j) {
    const int32_t code = t.kind == RowKind::u8 ? row[j] : row[j / 2] >> (j % 2 ? 4 : 0) & 15;
    sum += t.signs.values[j] > 0 ? code : -code;
  }
  return static_cast<uint32_t>(sum) & 0xffffffu;
}

// Converts with integer operations, as the result must not depend on flushing of denormals.
uint32_t float_bits(const RowTable& t, const uint8_t* row, int64_t j) {
  if (t.kind == RowKind::f32) return read<uint32_t>(row + 4 * j);
  const uint16_t bits = read<uint16_t>(row + 2 * j);
  if (t.kind == RowKind::bf16) return uint32_t{bits} << 16;
  const uint32_t sign = uint32_t{bits & 0x8000u} << 16;
  const uint32_t exponent = bits >> 10 & 31u, mantissa = bits & 1023u;
  if (exponent == 31) return sign | 0x7f800000u | mantissa << 13;
  if (exponent > 0) return sign | ((exponent + 112) << 23) | mantissa << 13;
  return sign | __builtin_bit_cast(uint32_t, static_cast<float>(mantissa) * 0x1p-24f);
}

double value_of(uint32_t bits) {
  const uint32_t magnitude = bits & 0x7fffffffu;
  const double size = magnitude < 0x00800000u ? static_cast<double>(magnitude) * 0x1p-149
                                              : double{__builtin_bit_cast(float, magnitude)};
  return bits >> 31 ? -size : size;
}

// Rounds up and clears the lowest 8 bits; the result is never infinity.
uint32_t rounded_up(uint32_t magnitude) {
  return (std::min(magnitude, 0x7f7fff00u) + 255u) & ~255u;
}

// Writes the checksums of a row, except its CRC, as they are stored.
int64_t sums_of(const RowTable& t, const uint8_t* row, uint8_t* to) {
  if (quantised(t.kind)) {
    const uint64_t parameters = t.kind == RowKind::u8 ? read<uint64_t>(row + t.layout.elements)
                                                      : read<uint32_t>(row + t.layout.elements);
    const uint32_t sum = sum_of_codes(t, row);
    const uint32_t word = sum | uint32_t{guard_of(parameters, sum)} << 24;
    std::memcpy(to, &word, 4);
    return 4;
  }
  double sum = 0;
  uint32_t peak = 0;
  for (int64_t j = 0; j < t.dim; ++j) {
    const uint32_t bits = float_bits(t, row, j);
    sum += t.signs.values[j] * value_of(bits);
    peak = std::max(peak, bits & 0x7fffffffu);
  }
  peak = rounded_up(peak);
  const uint32_t word = peak | guard_of(__builtin_bit_cast(uint64_t, sum), peak >> 8);
  std::memcpy(to, &sum, 8);
  std::memcpy(to + 8, &word, 4);
  return 12;
}

uint32_t crc_of(const RowTable& t, int64_t row) {
  return crc32c(static_cast<uint32_t>(row), row_of(t, row), t.layout.used() - 4);
}

// Returns the flips within one of so many bytes, or of the CRC behind them, that change the CRC by
// `change`; those of the fewest bits first.
std::vector<Flips> flips_behind(uint32_t change, int64_t bytes) {
  std::vector<Flips> found;
  if (change == 0) return found;
  CrcTable effect = kTable;
  for (int64_t byte = bytes - 1; byte >= 0; --byte) {
    for (uint32_t bits = 1; bits < 256; ++bits) {
      if (effect[bits] == change) found.push_back({byte, bits});
    }
    for (uint32_t& each : effect) each = (each >> 8) ^ kTable[each & 255];
  }
  const int in_crc = __builtin_ctz(change) / 8;
  if (change >> 8 * in_crc < 256) found.push_back({bytes + in_crc, change >> 8 * in_crc});
  std::stable_sort(found.begin(), found.end(), [](const Flips& a, const Flips& b) {
    return __builtin_popcount(a.bits) < __builtin_popcount(b.bits);
  });
  return found;
}

}  // namespace

Signs signs_of(int64_t dim) {
  static const Pattern pattern = make_pattern();
  const int32_t sum = pattern.sums[static_cast<size_t>(dim)];
  if (sum != 0) return {pattern.values[0].data(), static_cast<double>(sum)};
  return {pattern.values[1].data(), 2.0 * pattern.values[1][0]};
}

uint32_t crc32c(uint32_t crc, const void* bytes, int64_t count) {
  const auto* from = static_cast<const uint8_t*>(bytes);
#if defined(__x86_64__)
  static const bool instruction = __builtin_cpu_supports("sse4.2") != 0;
  if (instruction) return crc_by_instruction(crc, from, count);
#endif
  return crc_by_table(crc, from, count);
}

uint8_t guard_of(uint64_t parameters, uint32_t sum) {
  return static_cast<uint8_t>(crc32c(crc32c(0, &parameters, 8), &sum, 4));
}

void encode_row(const RowTable& t, int64_t row) {
  uint8_t* bytes = row_of(t, row);
  sums_of(t, bytes, bytes + t.layout.payload());
  const uint32_t crc = crc_of(t, row);
  std::memcpy(bytes + t.layout.used() - 4, &crc, 4);
}

bool intact(const RowTable& t, int64_t row) {
  const uint8_t* bytes = row_of(t, row);
  uint8_t sums[12];
  const auto count = static_cast<size_t>(sums_of(t, bytes, sums));
  return std::memcmp(sums, bytes + t.layout.payload(), count) == 0 &&
      read<uint32_t>(bytes + t.layout.used() - 4) == crc_of(t, row);
}

Flips correct_byte(const RowTable& t, int64_t row) {
  const int64_t covered = t.layout.used() - 4;
  uint8_t* bytes = row_of(t, row);
  const uint32_t change = read<uint32_t>(bytes + covered) ^ crc_of(t, row);
  for (const Flips& flips : flips_behind(change, covered)) {
    bytes[flips.byte] ^= static_cast<uint8_t>(flips.bits);
    if (intact(t, row)) return flips;
    bytes[flips.byte] ^= static_cast<uint8_t>(flips.bits);
  }
  return {};
}

}  // namespace holdfast
