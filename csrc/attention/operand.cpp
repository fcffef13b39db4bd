// Packing and encoding of K and V for the products of the tiles.
#include <cmath>
#include <type_traits>
#include <utility>

#include "attention/tiles.h"
#include "core/checksum_weights.h"

namespace holdfast {

template <>
const float* signs_of<float>(int64_t count) {
  return sign_weights(count).narrow;
}
template <>
const double* signs_of<double>(int64_t count) {
  return sign_weights(count).wide;
}

template <typename T>
const T* ones_of(int64_t count) {
  static const std::vector<T> ones(kKeyTile, T(1));
  TORCH_INTERNAL_ASSERT(count <= kKeyTile);
  return ones.data();
}

namespace {

// Returns z of the threshold (`statistics` in thresholds/rounding.py) for a row of the right
// operand.
template <typename T>
T spread_of(
    double square, double plain, int64_t inner, int64_t columns, double walk, double drift) {
  const double count = static_cast<double>(columns), mean = plain / count;
  const double noise = threshold_model().mean_noise / (count * count);
  const double beyond = std::max(0.0, mean * mean - noise * square);
  return static_cast<T>(walk * square + drift * static_cast<double>(inner) * count * beyond);
}

constexpr double kNone = 1e-30;  // smaller squares are not counted as repeats

template <typename T>
int64_t count_repeats(const T* square, const T* plain, int64_t count) {
  int64_t repeats = 0;
  for (int64_t k = 1; k < count; ++k) {
    const bool same = square[k] == square[k - 1] && plain[k] == plain[k - 1];
    repeats += same && square[k] > kNone ? 1 : 0;
  }
  return repeats;
}

double share_of(double repeats, int64_t count) {
  return count > 1 ? repeats / static_cast<double>(count - 1) : 0;
}

constexpr int64_t kGathered = 16;  // rows that are summed in T before the sum is added in fp64

}  // namespace

// The sums Σ_j K_jk r_j, Σ_j K_jk² and Σ_j K_jk over leading columns of a tile.
struct ColumnSums {
  explicit ColumnSums(int64_t width)
      : weighted(static_cast<size_t>(width)), square(weighted), plain(weighted) {}
  // Adds the columns from `begin`, a multiple of kGathered, to `end`.
  template <typename T>
  void add(const RowsView<T>& rows, int64_t begin, int64_t end) {
    const int64_t width = static_cast<int64_t>(weighted.size());
    const TilePasses<T>& passes = tile_passes<T>();
    const T *signs = signs_of<T>(end), *ones = ones_of<T>(kGathered);
    Buffer<T> sums(4 * width);
    for (int64_t j = begin; j < end; j += kGathered) {
      const T* from = rows.data + j * rows.row_stride;
      const int64_t some = std::min(kGathered, end - j);
      T *of_signs = sums.data(), *of_ones = of_signs + 2 * width;
      passes.columns(
          from, some, width, rows.row_stride, signs + j, ones, of_signs, of_signs + width);
      passes.columns(from, some, width, rows.row_stride, ones, ones, of_ones, of_ones + width);
      for (int64_t k = 0; k < width; ++k) {
        weighted[static_cast<size_t>(k)] += of_signs[k];
        square[static_cast<size_t>(k)] += of_signs[width + k];
        plain[static_cast<size_t>(k)] += of_ones[k];
      }
      sums.clear();
    }
  }
  std::vector<double> weighted, square, plain;
};

template <typename T>
Operand<T>::Operand(
    const at::Tensor& from, const Shapes& shapes, bool transposed, bool rows, Keep keep)
    : from_(from), shapes_(shapes), with_transposed_(transposed), with_rows_(rows), keep_(keep) {
  const int64_t matrices = keep == Keep::all ? shapes.batches * shapes.kv_heads : 1;
  const int64_t tiles = matrices * shapes.key_tiles;
  const int64_t keys = keep == Keep::tile ? shapes.stride() : matrices * shapes.padded_keys();
  if (transposed) {
    transposed_ = Buffer<T>(keys * shapes.width, Fill::none);
    checksum_ = Buffer<T>(tiles * shapes.prefixes() * shapes.width);
    spread_ = Buffer<T>(checksum_.size());
    growth_ = Buffer<T>(tiles * shapes.prefixes());
    if (shapes.narrow) narrow_transposed_ = Buffer<uint16_t>(keys * shapes.width, Fill::none);
  }
  if (rows) {
    const bool packed = !in_place(0) || !in_place(shapes.key_tiles - 1);
    rows_ = Buffer<T>(packed && !shapes.narrow ? keys * shapes.width : 0, Fill::none);
    if (shapes.narrow) narrow_rows_ = Buffer<uint16_t>(keys * shapes.width, Fill::none);
    row_sums_ = Buffer<T>(keys, Fill::none);
    if (!transposed) cross_sums_ = Buffer<T>(keys, Fill::none);
    largest_ = Buffer<T>(tiles);
    square_ = Buffer<T>(tiles);
    repeats_ = Buffer<T>(tiles);
  }
}

template <typename T>
RowsView<T> Operand<T>::source(int64_t matrix, int64_t tile) const {
  return rows_view<T>(from_, matrix / shapes_.kv_heads, matrix % shapes_.kv_heads, tile * kKeyTile);
}

// Returns true if products can read the tensor itself: it needs no padding, its rows are
// contiguous.
template <typename T>
bool Operand<T>::in_place(int64_t tile) const {
  return (from_.size(3) == 1 || from_.stride(3) == 1) && from_.stride(2) >= from_.size(3) &&
      shapes_.columns_of(tile) == shapes_.padded_columns(tile);
}

template <typename T>
const T* Operand<T>::transposed(int64_t matrix, int64_t tile) const {
  return transposed_.data() + row(matrix, tile) * shapes_.width;
}

template <typename T>
RowsView<const T> Operand<T>::rows(int64_t matrix, int64_t tile) const {
  if (in_place(tile)) {
    const RowsView<T> view = source(matrix, tile);
    return {view.data, view.row_stride, 1};
  }
  return {rows_.data() + row(matrix, tile) * shapes_.width, shapes_.width, 1};
}

template <typename T>
TileEncoding<T> Operand<T>::encoding(int64_t matrix, int64_t tile, int64_t columns) const {
  const int64_t at = place(matrix, tile) * shapes_.prefixes() + shapes_.prefix_of(columns);
  return {checksum_.data() + at * shapes_.width, spread_.data() + at * shapes_.width, growth_[at]};
}

template <typename T>
T Operand<T>::largest_square(int64_t matrix) const {
  const T* of_tiles = square_.data() + place(matrix, 0);
  return *std::max_element(of_tiles, of_tiles + shapes_.key_tiles);
}

template <typename T>
double Operand<T>::row_growth(int64_t matrix) const {
  double repeats = 0;
  for (int64_t t = 0; t < shapes_.key_tiles; ++t) repeats += repeats_[place(matrix, t)];
  return Chain<T>(shapes_.keys, kKeyTile).growth(share_of(repeats, shapes_.keys));
}

template <typename T>
typename Operand<T>::Slots Operand<T>::slots(int64_t matrix, int64_t tile) const {
  const int64_t at = place(matrix, tile);
  const int64_t begin = row(matrix, tile) * shapes_.width;
  Slots to{};
  if (with_transposed_) {
    to.transposed = transposed_.data() + begin;
    to.checksum = checksum_.data() + at * shapes_.prefixes() * shapes_.width;
    to.spread = spread_.data() + at * shapes_.prefixes() * shapes_.width;
    to.growth = growth_.data() + at * shapes_.prefixes();
    if (shapes_.narrow) to.narrow_transposed = narrow_transposed_.data() + begin;
  }
  if (with_rows_) {
    if (shapes_.narrow)
      to.narrow_rows = narrow_rows_.data() + begin;
    else if (!in_place(tile))
      to.rows = rows_.data() + begin;
    to.row_sums = row_sums_.data() + row(matrix, tile);
    if (!with_transposed_) to.cross_sums = cross_sums_.data() + row(matrix, tile);
    to.largest = largest_.data() + at;
    to.square = square_.data() + at;
    to.repeats = repeats_.data() + at;
  }
  return to;
}

template <typename T>
void Operand<T>::read(int64_t matrix, int64_t tile) {
  if (keep_ != Keep::all) {
    held_matrix_ = matrix;
    held_tile_ = tile;
    if (tile == 0 && with_rows_) repeats_.clear();  // they are of the previous matrix
  }
  read(matrix, tile, slots(matrix, tile));
}

// Stores the encoding of the leading columns of a tile from their sums.
template <typename T>
void Operand<T>::store_encoding(const ColumnSums& sums, int64_t columns, const Slots& to) const {
  const int64_t width = shapes_.width, prefix = shapes_.prefix_of(columns);
  const std::vector<double>&square = sums.square, &plain = sums.plain;
  const Chain<T> chain(width, width);
  const int64_t repeats = count_repeats(square.data(), plain.data(), width);
  const double growth = chain.growth(share_of(static_cast<double>(repeats), width));
  T *checksum = to.checksum + prefix * width, *spread = to.spread + prefix * width;
  for (int64_t k = 0; k < width; ++k) {
    const size_t at = static_cast<size_t>(k);
    checksum[k] = static_cast<T>(sums.weighted[at]);
    spread[k] = spread_of<T>(square[at], plain[at], width, columns, chain.walk, growth);
  }
  to.growth[prefix] = static_cast<T>(growth);
}

template <typename T>
void Operand<T>::read(int64_t matrix, int64_t tile, const Slots& to) const {
  const int64_t columns = shapes_.columns_of(tile), width = shapes_.width;
  const int64_t padded = shapes_.padded_columns(tile);
  const TilePasses<T>& passes = tile_passes<T>();
  RowsView<T> rows = source(matrix, tile);
  Buffer<T> copy;
  if (rows.column_stride != 1) {
    copy = Buffer<T>(columns * width);
    copy_rows(rows, columns, width, copy.data(), width);
    rows = {copy.data(), width, 1};
  }
  if (to.rows != nullptr) {
    copy_rows(rows, columns, width, to.rows, width);
    std::fill_n(to.rows + columns * width, (padded - columns) * width, T(0));
  }
  const auto pairs = [](const T* from, int64_t count, int64_t length, int64_t stride, auto* into) {
    if constexpr (std::is_same_v<T, float>) {
      attention_passes().narrow_pairs(from, count, length, stride, into, length);
    }
  };
  if (to.narrow_rows != nullptr) {
    pairs(rows.data, columns, width, rows.row_stride, to.narrow_rows);
    const int64_t whole = rounded_up(columns, 2);
    std::fill_n(to.narrow_rows + whole * width, (padded - whole) * width, uint16_t{0});
  }
  if (to.transposed != nullptr) {
    passes.transpose(rows.data, columns, width, rows.row_stride, to.transposed, padded);
    for (int64_t k = 0; k < width && columns < padded; ++k) {
      std::fill_n(to.transposed + k * padded + columns, padded - columns, T(0));
    }
    if (to.narrow_transposed != nullptr) {
      pairs(to.transposed, width, padded, padded, to.narrow_transposed);
    }
    ColumnSums sums(width);
    for (int64_t begin = 0; begin < columns;) {
      const int64_t end = shapes_.causal ? std::min(columns, begin + kQueryTile) : columns;
      sums.add(rows, begin, end);
      store_encoding(sums, end, to);
      begin = end;
    }
  }
  if (to.row_sums != nullptr) {
    Buffer<T> sums(2 * columns);
    T *square = sums.data(), *plain = square + columns;
    passes.sums(
        rows.data, columns, width, rows.row_stride, signs_of<T>(width), to.row_sums, square, plain,
        cross_signs_of<T>(width), to.cross_sums);
    std::fill_n(to.row_sums + columns, padded - columns, T(0));
    if (to.cross_sums != nullptr) std::fill_n(to.cross_sums + columns, padded - columns, T(0));
    const int64_t repeats = count_repeats(square, plain, columns);
    const Chain<T> chain(shapes_.keys, kKeyTile);
    const double growth = chain.growth(share_of(static_cast<double>(repeats), columns));
    T largest = 0, most = 0;
    for (int64_t j = 0; j < columns; ++j) {
      largest = std::max(
          largest, spread_of<T>(square[j], plain[j], shapes_.keys, width, chain.walk, growth));
      most = std::max(most, square[j]);
    }
    *to.largest = largest;
    *to.square = most;
    *to.repeats = static_cast<T>(repeats);
  }
}

template <typename T>
bool Operand<T>::finite(int64_t matrix, int64_t tile, int64_t columns) const {
  const RowsView<T> rows = source(matrix, tile);
  for (int64_t j = 0; j < columns; ++j) {
    for (int64_t k = 0; k < shapes_.width; ++k) {
      if (!std::isfinite(rows.data[j * rows.row_stride + k * rows.column_stride])) return false;
    }
  }
  return true;
}

namespace {

// Replaces the kept values if they differ, and returns true if they did.
template <typename T>
bool replaced(T* kept, const T* fresh, int64_t count) {
  if (kept == nullptr || same_bits(kept, fresh, count)) return false;
  std::copy_n(fresh, count, kept);
  return true;
}

}  // namespace

template <typename T>
typename Operand<T>::Damage Operand<T>::heal(int64_t matrix, int64_t tile) {
  const bool held = matrix == held_matrix_ && tile == held_tile_;
  if (keep_ == Keep::tile && !held) return {false, false};
  const int64_t width = shapes_.width, padded = shapes_.padded_columns(tile);
  const int64_t count = padded * width;
  const Slots kept = slots(matrix, tile);
  Slots fresh{};
  const int64_t prefixes = shapes_.prefixes();
  Buffer<T> memory(2 * count + (2 * width + 1) * prefixes + 2 * padded + 3);
  Buffer<uint16_t> narrow(2 * count);
  T* at = memory.data();
  const auto take = [&](T* Slots::* slot, int64_t entries) {
    if (kept.*slot != nullptr) fresh.*slot = std::exchange(at, at + entries);
  };
  struct Part {
    T* Slots::* slot;
    int64_t entries;
  };
  const Part packed[] = {{&Slots::transposed, count}, {&Slots::rows, count}};
  const Part encoded[] = {{&Slots::checksum, prefixes * width}, {&Slots::spread, prefixes * width},
                          {&Slots::growth, prefixes},           {&Slots::row_sums, padded},
                          {&Slots::cross_sums, padded},         {&Slots::largest, 1}};
  for (const Part& part : packed) take(part.slot, part.entries);
  for (const Part& part : encoded) take(part.slot, part.entries);
  take(&Slots::square, 1);
  take(&Slots::repeats, 1);
  if (kept.narrow_transposed != nullptr) fresh.narrow_transposed = narrow.data();
  if (kept.narrow_rows != nullptr) fresh.narrow_rows = narrow.data() + count;
  read(matrix, tile, fresh);
  const std::lock_guard<std::mutex> lock(healing_);
  Damage damage{};
  damage.packed |= replaced(kept.narrow_transposed, fresh.narrow_transposed, count);
  damage.packed |= replaced(kept.narrow_rows, fresh.narrow_rows, count);
  for (const Part& part : packed) {
    damage.packed |= replaced(kept.*part.slot, fresh.*part.slot, part.entries);
  }
  for (const Part& part : encoded) {
    damage.encoded |= replaced(kept.*part.slot, fresh.*part.slot, part.entries);
  }
  return damage;
}

template const float* ones_of<float>(int64_t);
template const double* ones_of<double>(int64_t);
template class Operand<float>;
template class Operand<double>;

}  // namespace holdfast
