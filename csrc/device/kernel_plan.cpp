#include "device/kernel_plan.h"

#include <algorithm>

namespace holdfast::device {

namespace {

constexpr int64_t kGroup = 64;  // GROUP in abft/gemm/kernels_verify.py
constexpr int64_t kTileBytes = 8192, kTileElements = 4096;
constexpr int64_t kWide = 512, kNarrow = 64;
// Columns of the narrowest tile whose columns are summed, if such tiles are enough programs.
constexpr int64_t kAcross = 128;
constexpr int64_t kAcrossBytes = 1024;  // sums of the widest, or threads run out of registers
// Enough for each multiprocessor of a large device to have two, and twice that for an even load.
constexpr int64_t kEnoughPrograms = 2 * 132, kWantedPrograms = 2 * kEnoughPrograms;

int64_t ceil_div(int64_t value, int64_t by) { return (value + by - 1) / by; }

Division tile_of(const Operand& operand, int64_t length, bool half) {
  // Half a tile of single bytes would be read in vectors of 8.
  const int64_t parts = half && operand.bytes > 1 ? 2 : 1;
  const int64_t elements = std::min(kTileElements, kTileBytes / operand.bytes) / parts;
  int64_t columns = std::min(kWide, elements / 4);
  if (operand.layout == Layout::columns) {
    columns = elements / kGroup;
  } else if (length <= kNarrow) {
    columns = kNarrow;
  }
  Division division;
  division.tile_rows = static_cast<int32_t>(elements / columns);
  division.tile_columns = static_cast<int32_t>(columns);
  return division;
}

// Divides rows of `length` among programs, each with whole tiles of a few rows.
Division by_rows(const Operand& operand, int64_t batch, int64_t rows, int64_t length, bool half) {
  Division d = tile_of(operand, length, half);
  const int64_t blocks = ceil_div(rows, d.tile_rows), tiles = ceil_div(length, d.tile_columns);
  const int64_t parts = std::min(tiles, ceil_div(kWantedPrograms, blocks * batch));
  d.steps = static_cast<int32_t>(ceil_div(tiles, parts));
  d.parts = static_cast<int32_t>(ceil_div(tiles, d.steps));
  d.programs = static_cast<int32_t>(blocks * d.parts);
  return d;
}

// Divides a matrix among programs of one tile's columns and some groups of rows. A row has a
// partial sum for each tile of columns, and a column one for each chunk of rows: wide tiles save
// the former, narrow ones, of which each program has more, the latter.
Division by_columns(const Operand& operand, int64_t rows, int64_t length, int64_t sum_bytes) {
  const Division widest = tile_of(operand, length, true);
  const int64_t groups = ceil_div(rows, kGroup);
  Division best;
  int64_t fewest = 0;
  for (int32_t halved = 1; widest.tile_rows * halved <= kGroup; halved *= 2) {
    Division d{widest.tile_rows * halved, widest.tile_columns / halved};
    if (d.tile_columns * sum_bytes > kAcrossBytes) continue;
    if (d.tile_columns < kAcross && best.programs >= kEnoughPrograms) break;
    const int64_t strips = ceil_div(length, d.tile_columns);
    const int64_t per_chunk = ceil_div(groups, std::min(groups, ceil_div(kWantedPrograms, strips)));
    const int64_t chunks = ceil_div(groups, per_chunk);
    d.parts = static_cast<int32_t>(strips);
    d.steps = static_cast<int32_t>(per_chunk * kGroup / d.tile_rows);
    d.programs = static_cast<int32_t>(strips * chunks);
    const int64_t sums = rows * strips + chunks * length;
    const bool both_fill = std::min(d.programs, best.programs) >= kEnoughPrograms;
    if (both_fill ? sums < fewest : d.programs > best.programs) {
      best = d;
      fewest = sums;
    }
  }
  return best;
}

int64_t sections_of_c(const Work& w) { return w.c.bytes == 0 ? 0 : (w.addend ? 4 : 2); }

int64_t sections_of_a(const Work& w) {
  const bool predicts = w.c.bytes > 0 && w.a.bytes > 0;
  return (predicts ? 2 : 0) + (w.encode ? 3 : 0);
}

Plan divided(const Work& w, bool half) {
  Plan plan;
  if (w.c.bytes > 0) plan.c = by_rows(w.c, w.batch, w.rows, w.columns, half);
  if (w.a.bytes > 0) {
    if (w.turned()) {
      plan.a = by_columns({Layout::rows, w.a.bytes}, w.inner, w.rows, w.sum_bytes);
    } else if (w.across) {
      plan.a = by_columns(w.a, w.rows, w.inner, w.sum_bytes);
    } else {
      plan.a = by_rows(w.a, w.batch, w.rows, w.inner, half || w.encode);
    }
  }
  return plan;
}

}  // namespace

Plan Plan::of(const Work& w) {
  Plan plan = divided(w, false);
  if (plan.programs() * w.batch < kEnoughPrograms) plan = divided(w, true);
  const int64_t all_rows = w.batch * w.rows, chunks = w.across ? plan.a.programs / plan.a.parts : 0;
  plan.counters = w.batch * ceil_div(w.rows, kGroup);
  if (w.across) plan.counters += w.turned() ? ceil_div(w.inner, kGroup) : plan.a.parts;
  const int64_t along = w.turned() ? w.inner : all_rows, beside = w.turned() ? w.rows : w.inner;
  plan.partials = sections_of_c(w) * plan.c.parts * all_rows +
      sections_of_a(w) * plan.a.parts * along + (w.encode ? 3 : 2) * chunks * beside;
  return plan;
}

int64_t bytes_moved(const Work& w, const Plan& plan, bool addend_is_row) {
  int64_t bytes = w.batch * w.rows * (w.columns * w.c.bytes + w.inner * w.a.bytes);
  if (w.addend) bytes += w.columns * w.c.bytes * (addend_is_row ? 1 : w.batch * w.rows);
  int64_t sums = plan.partials;
  if (w.c.bytes > 0 && w.a.bytes > 0) sums += 2 * w.batch * w.inner;  // s and z
  if (w.a.bytes == 0) sums += 2 * w.batch * w.rows;  // what is known of A
  const bool alone = w.c.bytes == 0;
  if (w.encode) sums += 2 * w.batch * w.rows * (alone ? 2 : 1);
  if (w.across) sums += alone ? 4 * w.inner : 2 * (w.rows + w.inner);
  const int64_t signs =
      (alone ? 0 : w.columns) + (w.encode ? w.inner : 0) + (alone && w.across ? w.rows : 0);
  return bytes + sums * w.sum_bytes + signs;
}

}  // namespace holdfast::device
