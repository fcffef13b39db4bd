// The verified products of a tile, the mask, and the report of errors.
#include "attention/tiles.h"

#include <ATen/Parallel.h>
#include <ATen/ops/from_blob.h>

#include <cmath>
#include <tuple>
#include <type_traits>

#include "attention/multiply.h"
#include "core/instruction_sets.h"

namespace holdfast {

const AttentionPasses& attention_passes() {
  static const AttentionPasses& chosen =
      beside_reductions<AttentionPasses>({HOLDFAST_SETS(attention_passes)});
  return chosen;
}

Mask::Mask(const Attention& problem, at::ScalarType accumulator) : causal_(problem.causal) {
  if (!problem.mask.has_value() || problem.mask->numel() == 0) return;
  mask_ = problem.mask->to(accumulator);
  while (mask_.dim() < 4) mask_ = mask_.unsqueeze(0);
  if (mask_.size(3) > 1 && mask_.stride(3) != 1) mask_ = mask_.contiguous();
  for (int64_t d = 0; d < 4; ++d) strides_.push_back(mask_.size(d) > 1 ? mask_.stride(d) : 0);
}

namespace {

template <typename T>
const T* mask_row(
    const at::Tensor& mask, const std::vector<int64_t>& strides, const TilePlace& place,
    int64_t row) {
  return mask.const_data_ptr<T>() + place.batch * strides[0] + place.head * strides[1] +
      (place.query_tile * kQueryTile + row) * strides[2] + place.key_tile * kKeyTile * strides[3];
}

}  // namespace

template <typename T>
TileMask<T> Mask::tile(const TilePlace& place, int64_t rows, int64_t columns, T* scratch) const {
  TileMask<T> tile;
  if (causal_) tile.diagonal = place.query_tile * kQueryTile + 1 - place.key_tile * kKeyTile;
  if (!mask_.defined()) return tile;
  tile.values = mask_row<T>(mask_, strides_, place, 0);
  tile.stride = strides_[2];
  if (strides_[3] == 0) {
    for (int64_t i = 0; i < rows; ++i) {
      std::fill_n(scratch + i * columns, columns, tile.values[i * strides_[2]]);
    }
    tile.values = scratch;
    tile.stride = columns;
  }
  return tile;
}

template <typename T>
TileDropout<T> dropout_of(const Attention& problem, const TilePlace& place) {
  if (!problem.kept.defined()) return {};
  const int64_t row = place.query_tile * kQueryTile, columns = problem.kept.size(3);
  const int64_t matrix = place.batch * problem.kept.size(1) + place.head;
  const auto* kept = static_cast<const uint8_t*>(problem.kept.const_data_ptr());
  kept += (matrix * problem.kept.size(2) + row) * columns + place.key_tile * kKeyTile;
  return {kept, columns, static_cast<T>(1 / (1 - problem.dropout))};
}

template <typename T>
bool Mask::strange(const TilePlace& place, int64_t row, int64_t columns) const {
  if (!mask_.defined()) return false;
  const T* values = mask_row<T>(mask_, strides_, place, row);
  for (int64_t j = 0; j < columns; ++j) {
    const T value = values[j * strides_[3]];
    if (std::isnan(value) || value == std::numeric_limits<T>::infinity()) return true;
  }
  return false;
}

namespace {

bool counted_only(Verdict verdict) {
  return verdict == Verdict::nonfinite || verdict == Verdict::overflow ||
      verdict == Verdict::dismissed;
}

auto order_of(const Finding& f) {
  const TilePlace& at = f.place;
  return std::tuple(
      at.batch, at.head, at.query_tile, at.key_tile, f.row, static_cast<int>(f.wrong));
}

}  // namespace

void Findings::add(const Finding& finding) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (Finding& known : all_) {
    const bool same = counted_only(finding.verdict) && known.verdict == finding.verdict &&
        std::strcmp(known.part, finding.part) == 0;
    if (!same) continue;
    const int64_t rows = known.rows + finding.rows;
    if (order_of(finding) < order_of(known)) known = finding;
    known.rows = rows;
    return;
  }
  all_.push_back(finding);
}

void Findings::suspect() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++suspects_;
}

void Findings::note_line(double line) {
  const std::lock_guard<std::mutex> lock(mutex_);
  line_ = line;
}

void Findings::finish(AttentionReport& report) {
  std::sort(all_.begin(), all_.end(), [](const Finding& left, const Finding& right) {
    return order_of(left) < order_of(right);
  });
  report.findings = std::move(all_);
  report.suspects = suspects_;
  report.line = line_;
}

template <typename T>
void add_product(
    const T* left, int64_t padded_rows, int64_t inner, uint16_t* narrow, Operand<T>& right,
    int64_t matrix, int64_t tile, const Shapes& shapes, T* sum) {
  const int64_t stride = shapes.stride();
  if constexpr (std::is_same_v<T, float>) {
    if (shapes.narrow) {
      attention_passes().narrow_rows(left, padded_rows, inner, stride, narrow, stride);
      multiply(
          padded_rows, shapes.width, inner, narrow, stride, right.narrow_rows(matrix, tile),
          shapes.width, sum, shapes.width, tile > 0);
      return;
    }
  }
  const RowsView<const T> rows = right.rows(matrix, tile);
  multiply(
      padded_rows, shapes.width, inner, left, stride, rows.data, rows.row_stride, sum, shapes.width,
      tile > 0);
}

template <typename T>
void visit(
    const Probe& probe, Stage stage, T* tile, int64_t rows, int64_t columns, int64_t stride,
    const TileProduct<T>& product, const Shapes& shapes) {
  if (!probe) return;
  const auto type = c10::CppTypeToScalarType<T>::value;
  const int64_t key_tile = product.place.key_tile;
  const int64_t keys = shapes.columns_seen(product.place), padded = shapes.padded_columns(key_tile);
  T* transposed = const_cast<T*>(product.operand.transposed(product.matrix, key_tile));
  probe(
      stage, at::from_blob(tile, {rows, columns}, {stride, 1}, type),
      at::from_blob(const_cast<T*>(product.a), {product.rows, shapes.width}, type),
      at::from_blob(transposed, {shapes.width, keys}, {padded, 1}, type));
}

namespace {

template <typename T>
void compute_into(const TileProduct<T>& p, const Shapes& shapes, T* out) {
  const int64_t tile = p.place.key_tile, padded = shapes.padded_columns(tile);
  const int64_t seen = shapes.padded_seen(p.place);
  if constexpr (std::is_same_v<T, float>) {
    if (shapes.narrow) {
      multiply(
          p.padded_rows, seen, shapes.width, p.narrow_a, shapes.width,
          p.operand.narrow_transposed(p.matrix, tile), padded, out, shapes.stride(), false);
    }
  }
  if (!shapes.narrow) {
    multiply(
        p.padded_rows, seen, shapes.width, p.a, shapes.width, p.operand.transposed(p.matrix, tile),
        padded, out, shapes.stride(), false);
  }
  const Stage stage = p.wrong == Wrong::scores ? Stage::scores : Stage::grad_probabilities;
  visit(p.probe, stage, out, p.rows, shapes.columns_seen(p.place), shapes.stride(), p, shapes);
}

template <typename T>
bool rows_agree(
    const TileProduct<T>& p, const Shapes& shapes, const T* left, const T* right, int64_t row) {
  const int64_t stride = shapes.stride(), padded = shapes.padded_seen(p.place);
  for (int64_t i = row; i < p.rows; ++i) {
    if (!same_bits(left + i * stride, right + i * stride, padded)) return false;
  }
  return true;
}

// Returns true if the sum of a row, computed in fp64, is within the full threshold.
template <typename T>
bool sum_is_right(const TileProduct<T>& p, const Shapes& shapes, const T* out, int64_t row) {
  const int64_t columns = shapes.columns_seen(p.place), padded = shapes.padded_seen(p.place);
  const TileEncoding<T> encoding = p.operand.encoding(p.matrix, p.place.key_tile, columns);
  const T* signs = signs_of<T>(padded);
  double sum = 0, energy = 0, dot = 0, spread = 0;
  for (int64_t j = 0; j < padded; ++j) {
    const double x = out[row * shapes.stride() + j];
    sum += x * signs[j];
    energy += x * x;
  }
  for (int64_t k = 0; k < shapes.width; ++k) {
    const double x = p.a[row * shapes.width + k];
    dot += x * encoding.checksum[k];
    spread += x * x * encoding.spread[k];
  }
  const TileBound<T> bound(shapes.width, columns);
  const double limit = bound(spread, encoding.growth, energy);
  return std::isfinite(limit) && std::abs(sum - dot) <= limit;
}

// Decides on a failed row that recomputation repeats: compares each element with its exact value
// and the largest possible rounding error.
template <typename T>
Verdict judged(const TileProduct<T>& p, const Shapes& shapes, int64_t row, int64_t& column) {
  const int64_t tile = p.place.key_tile, padded = shapes.padded_columns(tile);
  const T* b = p.operand.transposed(p.matrix, tile);
  const double unit = std::numeric_limits<T>::epsilon() / 2;
  const double steps = static_cast<double>(shapes.width + 2);
  for (int64_t j = 0; j < shapes.padded_seen(p.place); ++j) {
    double exact = 0, magnitude = 0;
    for (int64_t k = 0; k < shapes.width; ++k) {
      const double product = static_cast<double>(p.a[row * shapes.width + k]) * b[k * padded + j];
      exact += product;
      magnitude += std::abs(product);
    }
    const double value = p.out[row * shapes.stride() + j];
    const double bound =
        2 * std::expm1(steps * unit) * magnitude + steps * std::numeric_limits<T>::min();
    if (std::abs(value - exact) <= bound) continue;
    column = j;
    const bool overflows = !std::isfinite(value) && magnitude > std::numeric_limits<T>::max() / 2;
    return overflows ? Verdict::overflow : Verdict::persistent;
  }
  return Verdict::dismissed;
}

template <typename T>
bool finite_row(const TileProduct<T>& p, const Shapes& shapes, int64_t row) {
  const T* a = p.a + row * shapes.width;
  return std::all_of(a, a + shapes.width, [](T x) { return std::isfinite(x); });
}

template <typename T>
Finding finding_at(const TileProduct<T>& p, Verdict verdict, const char* part, int64_t row) {
  return {{p.wrong, part, p.place, row}, verdict};
}

// Replaces the rows from `row` on by those of a second computation.
template <typename T>
Finding replace_rows(const TileProduct<T>& p, const Shapes& shapes, const T* fresh, int64_t row) {
  const int64_t stride = shapes.stride(), padded = shapes.padded_seen(p.place);
  const char* part = p.wrong == Wrong::scores ? "scores" : "grad_probabilities";
  Finding finding = finding_at(p, Verdict::repaired, part, row);
  for (int64_t i = row; i < p.rows; ++i) {
    T* old = p.out + i * stride;
    for (int64_t j = 0; j < padded; ++j) {
      if (same_bits(old + j, fresh + i * stride + j, 1)) continue;
      if (finding.column < 0) {
        finding.row = i;
        finding.column = j;
        finding.corrupted = old[j];
        finding.repaired = fresh[i * stride + j];
      }
      old[j] = fresh[i * stride + j];
    }
  }
  return finding;
}

}  // namespace

template <typename T>
void compute(const TileProduct<T>& product, const Shapes& shapes) {
  compute_into(product, shapes, product.out);
}

template <typename T>
void expect(const TileProduct<T>& p, const Shapes& shapes) {
  const int64_t columns = shapes.columns_seen(p.place);
  const TileEncoding<T> encoding = p.operand.encoding(p.matrix, p.place.key_tile, columns);
  tile_passes<T>().dots(
      p.a, p.rows, shapes.width, shapes.width, encoding.checksum, encoding.spread, p.expected,
      p.limit);
  const TileBound<T> bound(shapes.width, columns);
  for (int64_t i = 0; i < p.rows; ++i) {
    const T limit = static_cast<T>(bound.without_energy(p.limit[i]));
    p.limit[i] = std::isfinite(limit) ? limit : T(-1);  // the limit overflows: -1 makes fp64 decide
  }
}

template <typename T>
int64_t settle(const TileProduct<T>& p, const Shapes& shapes, int64_t row, Findings& findings) {
  const int64_t tile = p.place.key_tile;
  if (sum_is_right(p, shapes, p.out, row)) return row + 1;
  findings.suspect();
  if (!finite_row(p, shapes, row)) {
    findings.add(finding_at(p, Verdict::nonfinite, p.a_name, row));
    return row + 1;
  }
  if (!p.operand.finite(p.matrix, tile, shapes.columns_seen(p.place))) {
    findings.add(finding_at(p, Verdict::nonfinite, p.b_name, row));
    return p.rows;
  }
  Buffer<T> fresh(p.padded_rows * shapes.stride()), previous(fresh.size());
  bool repeats = false;
  for (int attempt = 0; attempt < kRecomputations && !repeats; ++attempt) {
    compute_into(p, shapes, fresh.data());
    repeats = rows_agree(p, shapes, p.out, fresh.data(), row);
    const bool agrees = attempt > 0 && rows_agree(p, shapes, previous.data(), fresh.data(), row);
    if (!repeats && (agrees || sum_is_right(p, shapes, fresh.data(), row))) {
      findings.add(replace_rows(p, shapes, fresh.data(), row));
      return row;
    }
    std::swap(fresh, previous);
  }
  if (!repeats) {
    findings.add(finding_at(p, Verdict::persistent, "no two recomputations agree", row));
    return row + 1;
  }
  const auto damage = p.operand.heal(p.matrix, tile);
  if (damage.packed && damage.encoded) {
    findings.add(finding_at(p, Verdict::operand, p.b_name, row));
    return p.rows;
  }
  if (damage.packed) {
    compute_into(p, shapes, fresh.data());
    findings.add(replace_rows(p, shapes, fresh.data(), row));
    return row;
  }
  if (damage.encoded) {
    findings.add(finding_at(p, Verdict::checksum, p.b_name, row));
    expect(p, shapes);
    return row;
  }
  int64_t column = -1;
  const Verdict verdict = judged(p, shapes, row, column);
  const char* part = verdict == Verdict::overflow ? "scores" : "repeats a wrong value";
  Finding finding = finding_at(p, verdict, part, row);
  finding.column = column;
  findings.add(finding);
  return row + 1;
}

template <typename T>
void note_line(const TileProduct<T>& p, const Shapes& shapes, Findings& findings) {
  double energy = 0;
  const int64_t columns = shapes.columns_seen(p.place);
  for (int64_t j = 0; j < columns; ++j) energy += static_cast<double>(p.out[j]) * p.out[j];
  const double rms = std::sqrt(energy / static_cast<double>(columns));
  if (rms > 0 && std::isfinite(rms)) findings.note_line(p.limit[0] / rms);
}

void for_tasks(int64_t tasks, bool serial, const std::function<void(int64_t, int64_t)>& body) {
  if (serial) {
    if (tasks > 0) body(0, tasks);
  } else {
    at::parallel_for(0, tasks, 1, body);
  }
}

#define HOLDFAST_TILES(T)                                                                        \
  template TileMask<T> Mask::tile<T>(const TilePlace&, int64_t, int64_t, T*) const;              \
  template TileDropout<T> dropout_of<T>(const Attention&, const TilePlace&);                     \
  template bool Mask::strange<T>(const TilePlace&, int64_t, int64_t) const;                      \
  template void visit<T>(                                                                        \
      const Probe&, Stage, T*, int64_t, int64_t, int64_t, const TileProduct<T>&, const Shapes&); \
  template void compute<T>(const TileProduct<T>&, const Shapes&);                                \
  template void expect<T>(const TileProduct<T>&, const Shapes&);                                 \
  template void add_product<T>(                                                                  \
      const T*, int64_t, int64_t, uint16_t*, Operand<T>&, int64_t, int64_t, const Shapes&, T*);  \
  template int64_t settle<T>(const TileProduct<T>&, const Shapes&, int64_t, Findings&);          \
  template void note_line<T>(const TileProduct<T>&, const Shapes&, Findings&);
HOLDFAST_TILES(float)
HOLDFAST_TILES(double)
#undef HOLDFAST_TILES

}  // namespace holdfast
