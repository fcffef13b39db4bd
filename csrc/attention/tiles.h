// The tiling of attention, and the data precomputed from K and V before the loop over them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "attention/attention.h"
#include "attention/bounds.h"

namespace holdfast {

constexpr int64_t kKeyTile = 512;
constexpr int64_t kFewRows = 4;  // up to this many rows are not padded to kRowStep
constexpr int64_t kRowStep = 16;  // more rows are padded to a multiple of this
constexpr int kRecomputations = 3;  // at most, as RECOMPUTATIONS of abft/policy.py

inline int64_t rounded_up(int64_t count, int64_t step) { return (count + step - 1) / step * step; }

struct Shapes {
  explicit Shapes(const Attention& p, bool bf16 = false)
      : narrow(bf16),
        causal(p.causal),
        batches(p.q.size(0)),
        heads(p.q.size(1)),
        kv_heads(p.k.size(1)),
        queries(p.q.size(2)),
        keys(p.k.size(2)),
        width(p.q.size(3)),
        group(heads / std::max<int64_t>(kv_heads, 1)),
        query_tiles((queries + kQueryTile - 1) / kQueryTile),
        key_tiles((keys + kKeyTile - 1) / kKeyTile) {}
  int64_t rows_of(int64_t query_tile) const {
    return std::min(kQueryTile, queries - query_tile * kQueryTile);
  }
  int64_t columns_of(int64_t key_tile) const {
    return std::min(kKeyTile, keys - key_tile * kKeyTile);
  }
  int64_t padded_rows(int64_t rows) const {
    return rounded_up(rows, rows > kFewRows ? kRowStep : narrow ? 2 : 1);
  }
  int64_t padded_columns(int64_t key_tile) const {
    return rounded_up(columns_of(key_tile), kTileStep);
  }
  // The number of keys after padding with zeros, which gives each tile a length that suits GEMM.
  int64_t padded_keys() const {
    return key_tiles == 0 ? 0 : (key_tiles - 1) * kKeyTile + padded_columns(key_tiles - 1);
  }
  // The distance between two rows of a tile, in elements.
  int64_t stride() const { return std::min(kKeyTile, padded_keys()); }
  // Returns the number of key tiles that the rows of a query tile attend to.
  int64_t tiles_seen(int64_t query_tile) const {
    if (!causal) return key_tiles;
    const int64_t last = query_tile * kQueryTile + rows_of(query_tile);
    return std::min(key_tiles, (last + kKeyTile - 1) / kKeyTile);
  }
  // Returns the number of leading columns of a tile that its products compute. With a causal mask
  // they end with the key of the query tile's last row.
  int64_t columns_seen(const TilePlace& at) const {
    const int64_t columns = columns_of(at.key_tile);
    if (!causal) return columns;
    return std::min(columns, (at.query_tile + 1) * kQueryTile - at.key_tile * kKeyTile);
  }
  int64_t padded_seen(const TilePlace& at) const { return rounded_up(columns_seen(at), kTileStep); }
  // The numbers of leading columns that occur, of which each has an encoding, and the index of one.
  int64_t prefixes() const {
    return causal ? (std::min(kKeyTile, keys) + kQueryTile - 1) / kQueryTile : 1;
  }
  int64_t prefix_of(int64_t columns) const { return causal ? (columns - 1) / kQueryTile : 0; }
  bool narrow;  // true if the operands of the products are bf16
  bool causal;
  int64_t batches, heads, kv_heads, queries, keys, width, group, query_tiles, key_tiles;
};

bool in_bf16(const Attention& problem);  // of the tensors as the caller gave them

// Memory aligned to cache lines; `Fill` says if it is zeroed.
enum class Fill : int { zeros, none };
template <typename T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t count, Fill fill = Fill::zeros)
      : memory_(
            static_cast<T*>(::operator new[](
                static_cast<size_t>(std::max<int64_t>(count, 1)) * sizeof(T),
                std::align_val_t(64)))),
        count_(count) {
    if (fill == Fill::zeros) clear();
  }
  void clear() {
    std::memset(static_cast<void*>(memory_.get()), 0, static_cast<size_t>(count_) * sizeof(T));
  }
  T* data() const { return memory_.get(); }
  T& operator[](int64_t i) const { return memory_.get()[i]; }
  int64_t size() const { return count_; }

 private:
  struct Free {
    void operator()(T* p) const { ::operator delete[](p, std::align_val_t(64)); }
  };
  std::unique_ptr<T[], Free> memory_;
  int64_t count_ = 0;
};

template <typename T>
const T* signs_of(int64_t count);
template <typename T>
const T* cross_signs_of(int64_t width) {
  return signs_of<T>(2 * width) + width;
}
template <typename T>
const T* ones_of(int64_t count);  // `count` is at most kKeyTile

// The rows from `begin` of one matrix of a 4-D tensor of T.
template <typename T>
struct RowsView {
  T* data;
  int64_t row_stride, column_stride;
};
template <typename T>
RowsView<T> rows_view(const at::Tensor& t, int64_t batch, int64_t head, int64_t begin) {
  T* data = static_cast<T*>(t.data_ptr()) + batch * t.stride(0) + head * t.stride(1) +
      begin * t.stride(2);
  return {data, t.stride(2), t.size(3) == 1 ? 1 : t.stride(3)};
}
template <typename T>
void copy_rows(const RowsView<T>& from, int64_t rows, int64_t width, T* to, int64_t to_stride) {
  for (int64_t i = 0; i < rows; ++i) {
    const T* row = from.data + i * from.row_stride;
    if (from.column_stride == 1) {
      std::memcpy(to + i * to_stride, row, static_cast<size_t>(width) * sizeof(T));
    } else {
      for (int64_t k = 0; k < width; ++k) to[i * to_stride + k] = row[k * from.column_stride];
    }
  }
}

// The encoding of the leading columns of a tile of Kᵀ (or Vᵀ) as the right operand of Q Kᵀ: its
// checksum Kᵀ r over those keys, and the terms z and h of the threshold.
template <typename T>
struct TileEncoding {
  const T *checksum, *spread;  // [width]
  double growth;
};

struct ColumnSums;

// The part of a packed operand that is kept in memory. A smaller part stays in the cache.
enum class Keep : int { all, matrix, tile };

// K or V, packed and encoded for the products of its tiles.
template <typename T>
class Operand {
 public:
  // `transposed` and `rows` select the packed forms that are made: for products with the
  // transposed matrix, and for products with the matrix itself.
  Operand(const at::Tensor& from, const Shapes& shapes, bool transposed, bool rows, Keep keep);

  // Packs and encodes one tile, which must happen before its first use. `matrix` is batch · kv
  // heads + kv head. Tiles that `Keep` does not cover are overwritten.
  void read(int64_t matrix, int64_t tile);

  const T* transposed(int64_t matrix, int64_t tile) const;  // [width, padded columns]
  RowsView<const T> rows(int64_t matrix, int64_t tile) const;  // [padded columns, width]
  // The same two forms in bf16, in pairs of rows, for products of bf16.
  const uint16_t* narrow_transposed(int64_t matrix, int64_t tile) const {
    return narrow_transposed_.data() + row(matrix, tile) * shapes_.width;
  }
  const uint16_t* narrow_rows(int64_t matrix, int64_t tile) const {
    return narrow_rows_.data() + row(matrix, tile) * shapes_.width;
  }
  TileEncoding<T> encoding(int64_t matrix, int64_t tile, int64_t columns) const;
  const T* row_sums(int64_t matrix, int64_t tile) const {
    return row_sums_.data() + row(matrix, tile);
  }
  // Row sums with other signs, which detect errors in the weights of rows whose sum is nearly 0.
  const T* cross_sums(int64_t matrix, int64_t tile) const {
    return cross_sums_.data() + row(matrix, tile);
  }
  T largest_spread(int64_t matrix, int64_t tile) const { return largest_[place(matrix, tile)]; }
  T largest_square(int64_t matrix) const;  // max_j ‖K_j‖²
  double row_growth(int64_t matrix) const;  // the term h of the threshold for products with `rows`
  bool finite(int64_t matrix, int64_t tile, int64_t columns) const;  // of the leading columns

  // Packs and encodes a tile again, replaces what differs, and returns which of the two differed.
  struct Damage {
    bool packed, encoded;
  };
  Damage heal(int64_t matrix, int64_t tile);

 private:
  struct Slots {
    T *transposed, *rows;  // null if that form is not made
    uint16_t *narrow_transposed, *narrow_rows;
    T *checksum, *spread, *growth;  // made with `transposed`, for each number of leading columns
    T *row_sums, *largest, *square, *repeats;  // made with `rows`
    T* cross_sums;  // made if only `rows` is made
  };
  int64_t place(int64_t matrix, int64_t tile) const {
    return (keep_ == Keep::all ? matrix * shapes_.key_tiles : 0) + tile;
  }
  int64_t row(int64_t matrix, int64_t tile) const {
    return (keep_ == Keep::all ? matrix * shapes_.padded_keys() : 0) +
        (keep_ == Keep::tile ? 0 : tile * kKeyTile);
  }
  Slots slots(int64_t matrix, int64_t tile) const;
  void read(int64_t matrix, int64_t tile, const Slots& to) const;
  void store_encoding(const ColumnSums& sums, int64_t columns, const Slots& to) const;
  RowsView<T> source(int64_t matrix, int64_t tile) const;
  bool in_place(int64_t tile) const;

  at::Tensor from_;
  Shapes shapes_;
  bool with_transposed_, with_rows_;
  Keep keep_;
  int64_t held_matrix_ = -1, held_tile_ = -1;  // the tile that was read last
  Buffer<uint16_t> narrow_transposed_, narrow_rows_;
  Buffer<T> transposed_, rows_, checksum_, spread_, growth_, row_sums_, cross_sums_, largest_;
  Buffer<T> square_, repeats_;
  std::mutex healing_;
};

// Additive mask [batch | 1, heads | 1, Lq, Lk] as tiles of T.
class Mask {
 public:
  Mask(const Attention& problem, at::ScalarType accumulator);
  // Returns the mask in place; a mask with one value for all keys is expanded into `scratch`.
  bool fills_scratch() const { return mask_.defined() && strides_[3] == 0; }
  template <typename T>
  TileMask<T> tile(const TilePlace& place, int64_t rows, int64_t columns, T* scratch) const;
  // Returns true if a row of a tile has a NaN or +INF, for which softmax is undefined.
  template <typename T>
  bool strange(const TilePlace& place, int64_t row, int64_t columns) const;

 private:
  at::Tensor mask_;
  bool causal_;
  std::vector<int64_t> strides_;
};

// What dropout keeps of a tile; nothing is dropped if the problem has no dropout.
template <typename T>
TileDropout<T> dropout_of(const Attention& problem, const TilePlace& place);

// The errors that the tasks of one call detected; tasks may run in parallel.
class Findings {
 public:
  void add(const Finding& finding);
  void suspect();
  void note_line(double line);
  void finish(AttentionReport& report);

 private:
  std::mutex mutex_;
  std::vector<Finding> all_;
  int64_t suspects_ = 0;
  double line_ = 0;
};

// S = Q Kᵀ, or dP = dO Vᵀ, of one tile.
template <typename T>
struct TileProduct {
  const T* a;  // [padded rows, width]
  const uint16_t* narrow_a;  // `a` in bf16, for products of bf16
  int64_t rows, padded_rows;
  T* out;  // [padded rows, stride]
  Operand<T>& operand;
  int64_t matrix;
  TilePlace place;
  T *expected, *limit;  // [rows]: expected row sums, and their thresholds
  Wrong wrong;
  const char *a_name, *b_name;
  const Probe& probe;
};

template <typename T>
void compute(const TileProduct<T>& product, const Shapes& shapes);
template <typename T>
void expect(const TileProduct<T>& product, const Shapes& shapes);

// O += P V, or dQ += dS K: a tile [padded rows, stride], of which `inner` columns count, times as
// many rows of an operand, added to `sum` [padded rows, width], which the first tile overwrites.
// For products of bf16, the left factor is converted into `narrow`.
template <typename T>
void add_product(
    const T* left, int64_t padded_rows, int64_t inner, uint16_t* narrow, Operand<T>& right,
    int64_t matrix, int64_t tile, const Shapes& shapes, T* sum);

// Decides on a row whose sum is beyond its threshold, and repairs it if possible, without changing
// the rows before it. Returns the row from which the comparison continues.
template <typename T>
int64_t settle(
    const TileProduct<T>& product, const Shapes& shapes, int64_t row, Findings& findings);

// Records the threshold of the first row relative to the row's rms.
template <typename T>
void note_line(const TileProduct<T>& product, const Shapes& shapes, Findings& findings);

// Calls the probe, if there is one, with the tile of a stage.
template <typename T>
void visit(
    const Probe& probe, Stage stage, T* tile, int64_t rows, int64_t columns, int64_t stride,
    const TileProduct<T>& product, const Shapes& shapes);

template <typename T>
bool same_bits(const T* left, const T* right, int64_t count) {
  return std::memcmp(left, right, static_cast<size_t>(count) * sizeof(T)) == 0;
}

// Calls the probe likewise, then changed(row, column, before) for each element that it changed, so
// that sums over the tile can be updated.
template <typename T, typename Changed>
void visit_computed(
    const Probe& probe, Stage stage, T* tile, int64_t rows, int64_t columns, int64_t stride,
    const TileProduct<T>& product, const Shapes& shapes, const Changed& changed) {
  if (!probe) return;
  const std::vector<T> before(tile, tile + (rows - 1) * stride + columns);
  visit(probe, stage, tile, rows, columns, stride, product, shapes);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      const T* old = &before[static_cast<size_t>(i * stride + j)];
      if (!same_bits(old, tile + i * stride + j, 1)) changed(i, j, *old);
    }
  }
}

// Runs body(first, last) over all tasks, in parallel unless `serial`.
void for_tasks(int64_t tasks, bool serial, const std::function<void(int64_t, int64_t)>& body);

}  // namespace holdfast
