// The forward pass: for each query tile a loop over the key tiles, with every product checked.
#include <ATen/OpMathType.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <cmath>
#include <type_traits>

#include "attention/multiply.h"
#include "attention/tiles.h"
#include "core/laps.h"

namespace holdfast {

namespace {

// The packed operands: K for the scores and V for the output.
template <typename T>
struct Both {
  Both(const Attention& problem, const Shapes& shapes, Keep keep)
      : keys(problem.k, shapes, true, false, keep), values(problem.v, shapes, false, true, keep) {}
  Operand<T> keys, values;
};

// The buffers that a thread needs for one query tile.
template <typename T>
struct ForwardScratch {
  ForwardScratch(const Shapes& shapes, bool with_mask, Both<T>& both)
      : keys(both.keys),
        values(both.values),
        narrow_query(shapes.narrow ? kQueryTile * shapes.width : 0),
        narrow_scores(shapes.narrow ? kQueryTile * shapes.stride() : 0),
        query(kQueryTile * shapes.width),
        scores(kQueryTile * shapes.stride()),
        output(kQueryTile * shapes.width),
        mask(with_mask ? kQueryTile * shapes.stride() : 0),
        state(kStates * kQueryTile),
        excused(kQueryTile) {}
  static constexpr int64_t kStates = 12;
  T* row_values(int64_t which) const { return state.data() + which * kQueryTile; }
  SoftmaxState<T> softmax_state() const {
    return {row_values(0), row_values(1), row_values(2), row_values(3),
            row_values(4), row_values(5), row_values(6)};
  }
  T* expected() const { return row_values(7); }
  T* limit() const { return row_values(8); }
  T* sums() const { return row_values(9); }
  T* energies() const { return row_values(10); }
  T* cross_sums() const { return row_values(11); }
  Operand<T>&keys, &values;
  Buffer<uint16_t> narrow_query, narrow_scores;
  Buffer<T> query, scores, output, mask, state;
  Buffer<uint8_t> excused;
};

template <typename T>
class Forward {
 public:
  Forward(
      const Attention& problem, const Shapes& shapes, const AttentionChecks& checks, at::Tensor out,
      at::Tensor lse)
      : problem_(problem),
        checks_(checks),
        shapes_(shapes),
        mask_(problem, c10::CppTypeToScalarType<T>::value),
        out_(std::move(out)),
        lse_(std::move(lse)) {}

  // If each tile of K and V serves only one query tile, it is read just before its use.
  bool reads_late() const { return shapes_.query_tiles == 1 && shapes_.group == 1; }

  void encode() {
    if (reads_late()) return;
    both_ = std::make_unique<Both<T>>(problem_, shapes_, Keep::all);
    const int64_t matrices = shapes_.batches * shapes_.kv_heads;
    for_tasks(matrices * shapes_.key_tiles, false, [&](int64_t first, int64_t last) {
      for (int64_t task = first; task < last; ++task) {
        both_->keys.read(task / shapes_.key_tiles, task % shapes_.key_tiles);
        both_->values.read(task / shapes_.key_tiles, task % shapes_.key_tiles);
      }
    });
  }

  void run() {
    const int64_t tasks = shapes_.batches * shapes_.heads * shapes_.query_tiles;
    for_tasks(tasks, static_cast<bool>(checks_.probe), [&](int64_t first, int64_t last) {
      std::unique_ptr<Both<T>> own;
      if (reads_late()) own = std::make_unique<Both<T>>(problem_, shapes_, Keep::tile);
      ForwardScratch<T> scratch(shapes_, mask_.fills_scratch(), own ? *own : *both_);
      for (int64_t task = first; task < last; ++task) {
        const int64_t head = task / shapes_.query_tiles;
        const int64_t tile = task % shapes_.query_tiles;
        query_tile({head / shapes_.heads, head % shapes_.heads, tile, -1}, scratch);
      }
      if (shapes_.narrow) end_multiplying();
    });
  }

  Findings& findings() { return findings_; }

 private:
  int64_t matrix(const TilePlace& place) const {
    return place.batch * shapes_.kv_heads + place.head / shapes_.group;
  }

  void query_tile(const TilePlace& place, ForwardScratch<T>& scratch) {
    const int64_t rows = shapes_.rows_of(place.query_tile);
    scratch.query.clear();
    copy_rows(
        rows_view<T>(problem_.q, place.batch, place.head, place.query_tile * kQueryTile), rows,
        shapes_.width, scratch.query.data(), shapes_.width);
    if constexpr (std::is_same_v<T, float>) {
      if (shapes_.narrow) {
        attention_passes().narrow_rows(
            scratch.query.data(), kQueryTile, shapes_.width, shapes_.width,
            scratch.narrow_query.data(), shapes_.width);
      }
    }
    std::fill_n(scratch.excused.data(), kQueryTile, checks_.verify ? 0 : 1);
    settle_rows(place, rows, scratch);
    store(place, rows, scratch);
  }

  // Computes a query tile until it passes its checks or two computations agree.
  void settle_rows(const TilePlace& place, int64_t rows, ForwardScratch<T>& scratch) {
    std::optional<Finding> first;
    std::vector<std::vector<T>> earlier;
    for (int attempt = 0;; ++attempt) {
      std::optional<Failure> failure = loop_over_keys(place, rows, scratch);
      for (int64_t row = 0; !failure && row < rows;) {
        row = finish(place, rows, row, scratch);
        if (row >= rows) break;
        std::vector<T> result = result_of(rows, scratch);
        const bool repeats = std::any_of(earlier.begin(), earlier.end(), [&](const auto& each) {
          return same_bits(each.data(), result.data(), static_cast<int64_t>(result.size()));
        });
        if (!repeats) {
          earlier.push_back(std::move(result));
          failure =
              failed(consistent(row, scratch) ? Wrong::accumulator : Wrong::state, place, row);
          break;
        }
        judge_output(place, row, scratch);
        ++row;
      }
      if (!failure) {
        if (first) report_repair(*first, rows, earlier, scratch);
        return;
      }
      findings_.suspect();
      if (!first) first = Finding{*failure, Verdict::repaired};
      if (attempt == kRecomputations) {
        Finding given_up = *first;
        given_up.verdict = Verdict::persistent;
        findings_.add(given_up);
        std::fill_n(scratch.excused.data(), kQueryTile, 1);
        loop_over_keys(place, rows, scratch);
        finish(place, rows, 0, scratch);
        return;
      }
    }
  }

  static Failure failed(Wrong wrong, const TilePlace& place, int64_t row) {
    const char* part = wrong == Wrong::probabilities ? "probabilities"
        : wrong == Wrong::state                      ? "state"
                                                     : "accumulator";
    return {wrong, part, place, row};
  }

  std::vector<T> result_of(int64_t rows, const ForwardScratch<T>& scratch) const {
    std::vector<T> result(scratch.output.data(), scratch.output.data() + rows * shapes_.width);
    const SoftmaxState<T> state = scratch.softmax_state();
    result.insert(result.end(), state.maximum, state.maximum + rows);
    result.insert(result.end(), state.sum, state.sum + rows);
    return result;
  }

  // Reports a repair with the first element, if any, in which the failed result differs from the
  // one that is used.
  void report_repair(
      Finding finding, int64_t rows, const std::vector<std::vector<T>>& earlier,
      const ForwardScratch<T>& scratch) {
    if (!earlier.empty()) {
      const std::vector<T>& before = earlier.front();
      for (int64_t i = 0; i < rows * shapes_.width; ++i) {
        if (same_bits(&before[static_cast<size_t>(i)], scratch.output.data() + i, 1)) continue;
        finding.row = i / shapes_.width;
        finding.column = i % shapes_.width;
        finding.corrupted = before[static_cast<size_t>(i)];
        finding.repaired = scratch.output[i];
        findings_.add(finding);
        return;
      }
      const std::vector<T> now = result_of(rows, scratch);
      if (same_bits(before.data(), now.data(), static_cast<int64_t>(before.size()))) {
        return;  // equal results: there was no fault to repair
      }
    }
    findings_.add(finding);
  }

  std::optional<Failure> loop_over_keys(
      const TilePlace& at, int64_t rows, ForwardScratch<T>& scratch) {
    const SoftmaxState<T> state = scratch.softmax_state();
    for (T* each : {state.maximum, state.maximum_copy}) {
      std::fill_n(each, kQueryTile, -std::numeric_limits<T>::infinity());
    }
    for (T* each : {state.sum, state.sum_copy, state.carry, state.cross, state.weight}) {
      std::fill_n(each, kQueryTile, T(0));
    }
    const int64_t tiles = shapes_.tiles_seen(at.query_tile);
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const TilePlace place{at.batch, at.head, at.query_tile, tile};
      if (auto failure = key_tile(place, rows, scratch)) return failure;
    }
    return std::nullopt;
  }

  std::optional<Failure> key_tile(
      const TilePlace& place, int64_t rows, ForwardScratch<T>& scratch) {
    const int64_t tile = place.key_tile, columns = shapes_.columns_seen(place);
    const int64_t padded_rows = shapes_.padded_rows(rows), matrix = this->matrix(place);
    if (reads_late()) {
      scratch.keys.read(matrix, tile);
      scratch.values.read(matrix, tile);
    }
    const TileProduct<T> scores{
        scratch.query.data(),
        scratch.narrow_query.data(),
        rows,
        padded_rows,
        scratch.scores.data(),
        scratch.keys,
        matrix,
        place,
        scratch.expected(),
        scratch.limit(),
        Wrong::scores,
        "q",
        "k",
        checks_.probe};
    compute(scores, shapes_);
    expect(scores, shapes_);
    if (place.batch == 0 && place.head == 0 && place.query_tile == 0 && tile == 0) {
      note_line(scores, shapes_, findings_);
    }
    const SoftmaxTile<T> work{
        shapes_.narrow,
        rows,
        columns,
        shapes_.padded_seen(place),
        shapes_.stride(),
        scratch.scores.data(),
        mask_.template tile<T>(place, rows, columns, scratch.mask.data()),
        dropout_of<T>(problem_, place),
        static_cast<T>(problem_.scale),
        signs_of<T>(kKeyTile),
        scratch.expected(),
        scratch.limit(),
        scratch.values.row_sums(matrix, tile),
        scratch.values.cross_sums(matrix, tile),
        scratch.values.largest_spread(matrix, tile),
        scratch.softmax_state(),
        tile == 0 ? nullptr : scratch.output.data(),
        shapes_.width,
        scratch.excused.data()};
    for (int64_t row = 0, cleared = 0;;) {
      const RowVerdict verdict = tile_passes<T>().softmax(work, row, cleared);
      if (verdict.wrong == Wrong::nothing) break;
      row = verdict.row;
      if (verdict.wrong == Wrong::scores) {
        cleared = settle(scores, shapes_, row, findings_);
      } else if (explained(place, row, scratch)) {
        scratch.excused[row] = 1;
        const int64_t stride = shapes_.stride();
        Buffer<T> fresh(padded_rows * stride);
        TileProduct<T> again = scores;
        again.out = fresh.data();
        compute(again, shapes_);
        std::copy_n(fresh.data() + row * stride, stride, scratch.scores.data() + row * stride);
      } else {
        return failed(verdict.wrong, place, row);
      }
    }
    if (auto failure = strike_exponentials(scores, work)) return failure;
    visit(
        checks_.probe, Stage::probabilities, work.scores, rows, columns, work.stride, scores,
        shapes_);
    add_product(
        work.scores, padded_rows, work.padded, scratch.narrow_scores.data(), scratch.values, matrix,
        tile, shapes_, scratch.output.data());
    visit(
        checks_.probe, Stage::accumulator, scratch.output.data(), rows, shapes_.width,
        shapes_.width, scores, shapes_);
    visit(checks_.probe, Stage::state, work.state.maximum, 2, rows, kQueryTile, scores, shapes_);
    return std::nullopt;
  }

  // Lets a probe change exponentials; updates the sums and makes the checks as the pass would have.
  // With dropout the probe sees and changes them as they are after it.
  std::optional<Failure> strike_exponentials(
      const TileProduct<T>& product, const SoftmaxTile<T>& work) const {
    std::optional<Failure> failure;
    const T most = work.dropout.factor;
    visit_computed(
        checks_.probe, Stage::exponentials, work.scores, work.rows, work.columns, work.stride,
        product, shapes_, [&](int64_t row, int64_t column, T before) {
          const T* p = work.scores + row * work.stride;
          const T now = p[column], change = now - before;
          const T* end = p + work.columns;
          const bool attained = before != most || std::find(p, end, most) != end;
          const bool within = now >= 0 && now <= most && !std::signbit(now);
          if (work.excused[row] == 0 && !(within && attained) && !failure) {
            failure = failed(Wrong::probabilities, product.place, row);
          }
          work.state.sum[row] += change / most;
          work.state.sum_copy[row] += change / most;
          work.state.carry[row] += change * work.value_sums[column];
          work.state.cross[row] += change * work.cross_sums[column];
          work.state.weight[row] += change * most * work.largest;
        });
    return failure;
  }

  // Returns true if a NaN or INF in the inputs explains a row's softmax.
  bool explained(const TilePlace& place, int64_t row, const ForwardScratch<T>& scratch) {
    const T* query = scratch.query.data() + row * shapes_.width;
    const auto finite = [](T x) { return std::isfinite(x); };
    const int64_t columns = shapes_.columns_seen(place);
    const char* part = nullptr;
    if (!std::all_of(query, query + shapes_.width, finite))
      part = "q";
    else if (mask_.template strange<T>(place, row, columns))
      part = "mask";
    else if (!scratch.keys.finite(matrix(place), place.key_tile, columns))
      part = "k";
    else if (!std::isfinite(static_cast<T>(problem_.scale)))
      part = "scale";
    if (part == nullptr) return overflowed(place, row, scratch);
    findings_.add({{Wrong::probabilities, part, place, row}, Verdict::nonfinite});
    return true;
  }

  // Returns true if scores of finite inputs overflow before or after scaling.
  bool overflowed(const TilePlace& place, int64_t row, const ForwardScratch<T>& scratch) {
    const T* query = scratch.query.data() + row * shapes_.width;
    const int64_t padded = shapes_.padded_columns(place.key_tile);
    const T* keys = scratch.keys.transposed(matrix(place), place.key_tile);
    const double factor = std::max(1.0, std::abs(problem_.scale));
    for (int64_t j = 0; j < shapes_.columns_seen(place); ++j) {
      double magnitude = 0;
      for (int64_t k = 0; k < shapes_.width; ++k) {
        magnitude += std::abs(static_cast<double>(query[k]) * keys[k * padded + j]);
      }
      if (magnitude * factor > std::numeric_limits<T>::max() / 2) {
        findings_.add({{Wrong::probabilities, "scores", place, row}, Verdict::overflow});
        return true;
      }
    }
    return false;
  }

  // Normalises the rows if `from` is 0, and compares rows from `from` on with their checksums.
  // Returns the first row that differs.
  int64_t finish(const TilePlace& place, int64_t rows, int64_t from, ForwardScratch<T>& scratch) {
    const SoftmaxState<T> state = scratch.softmax_state();
    if (from == 0) {
      T factor[kQueryTile];
      for (int64_t i = 0; i < rows; ++i) factor[i] = state.sum[i] == 0 ? T(1) : 1 / state.sum[i];
      if (shapes_.tiles_seen(place.query_tile) == 0) scratch.output.clear();
      tile_passes<T>().finish(
          scratch.output.data(), rows, shapes_.width, shapes_.width, factor,
          signs_of<T>(shapes_.width), scratch.sums(), scratch.energies(),
          cross_signs_of<T>(shapes_.width), scratch.cross_sums());
    }
    const TileBound<T> bound(shapes_.keys, shapes_.width);
    const double growth = scratch.values.row_growth(matrix(place));
    for (int64_t i = from; i < rows; ++i) {
      if (scratch.excused[i] != 0) continue;
      if (!consistent(i, scratch)) return i;
      const auto [residual, spread] = of_output(i, scratch);
      const double limit = bound(spread, growth, scratch.energies()[i]);
      if (std::isfinite(limit) && std::abs(residual) <= limit) continue;
      if (nonfinite_values(place, i, scratch)) {
        scratch.excused[i] = 1;
        continue;
      }
      return i;
    }
    return rows;
  }

  // Returns true if the running maximum and sum are possible values and equal their copies.
  bool consistent(int64_t row, const ForwardScratch<T>& scratch) const {
    const SoftmaxState<T> state = scratch.softmax_state();
    const bool agree = same_bits(state.maximum + row, state.maximum_copy + row, 1) &&
        same_bits(state.sum + row, state.sum_copy + row, 1);
    const double sum = state.sum[row], most = static_cast<double>(shapes_.keys) * (1 + 1e-3);
    const bool empty = sum == 0 && state.maximum[row] == -std::numeric_limits<T>::infinity();
    return agree && (empty || (sum >= 1 && sum <= most && std::isfinite(state.maximum[row])));
  }

  struct OfOutput {
    double residual, spread;
  };
  OfOutput of_output(int64_t row, const ForwardScratch<T>& scratch) const {
    const SoftmaxState<T> state = scratch.softmax_state();
    const double factor = state.sum[row] == 0 ? 1 : 1 / static_cast<double>(state.sum[row]);
    const double residual = scratch.sums()[row] - state.carry[row] * factor;
    const double cross = scratch.cross_sums()[row] - state.cross[row] * factor;
    const bool first = std::isnan(residual) || std::abs(cross) <= std::abs(residual);
    return {first ? residual : cross, state.weight[row] * factor * factor};
  }

  bool nonfinite_values(const TilePlace& place, int64_t row, ForwardScratch<T>& scratch) {
    const int64_t tiles = shapes_.tiles_seen(place.query_tile);
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const TilePlace at{place.batch, place.head, place.query_tile, tile};
      if (scratch.values.finite(matrix(place), tile, shapes_.columns_seen(at))) continue;
      findings_.add({{Wrong::accumulator, "v", at, row}, Verdict::nonfinite});
      return true;
    }
    return false;
  }

  // Decides on a failed row that recomputation repeats: it is due to rounding, to a damaged
  // checksum or to a persistent fault.
  void judge_output(const TilePlace& place, int64_t row, ForwardScratch<T>& scratch) {
    const auto [residual, spread] = of_output(row, scratch);
    const TileBound<T> bound(shapes_.keys, shapes_.width);
    const Chain<T> chain(shapes_.keys, kKeyTile);
    const double worst = bound.worst(chain.steps, spread / chain.walk, scratch.energies()[row]);
    Finding finding{
        {Wrong::accumulator, "repeats a wrong value", place, row},
        std::abs(residual) <= worst ? Verdict::dismissed : Verdict::persistent};
    for (int64_t tile = 0; tile < shapes_.key_tiles; ++tile) {
      if (finding.verdict != Verdict::persistent) break;
      const auto damage = scratch.values.heal(matrix(place), tile);
      if (!damage.packed && !damage.encoded) continue;
      finding.verdict = damage.packed ? Verdict::operand : Verdict::checksum;
      finding.part = "v";
    }
    findings_.add(finding);
  }

  void store(const TilePlace& place, int64_t rows, const ForwardScratch<T>& scratch) {
    const SoftmaxState<T> state = scratch.softmax_state();
    const int64_t begin = place.query_tile * kQueryTile;
    const RowsView<T> out = rows_view<T>(out_, place.batch, place.head, begin);
    T* lse = lse_.data_ptr<T>() + place.batch * lse_.stride(0) + place.head * lse_.stride(1) +
        begin * lse_.stride(2);
    for (int64_t i = 0; i < rows; ++i) {
      const T* from = scratch.output.data() + i * shapes_.width;
      for (int64_t k = 0; k < shapes_.width; ++k) {
        out.data[i * out.row_stride + k * out.column_stride] = from[k];
      }
      const bool empty = state.sum[i] == 0;
      lse[i * lse_.stride(2)] = empty ? T(0) : state.maximum[i] + std::log(state.sum[i]);
    }
  }

  const Attention& problem_;
  const AttentionChecks& checks_;
  Shapes shapes_;
  Mask mask_;
  std::unique_ptr<Both<T>> both_;  // null if they are read late
  at::Tensor out_, lse_;
  Findings findings_;
};

template <typename T>
void forward(
    const Attention& problem, const Shapes& shapes, const AttentionChecks& checks,
    const at::Tensor& out, const at::Tensor& lse, AttentionReport& report) {
  Forward<T> run(problem, shapes, checks, out, lse);
  Laps laps;
  run.encode();
  report.encode_s = laps.lap();
  run.run();
  run.findings().finish(report);
}

bool same_matrices(const at::Tensor& left, const at::Tensor& right) {
  return left.size(0) == right.size(0) && left.size(3) == right.size(3);
}

bool fits(const at::Tensor& mask, const Attention& p) {
  if (mask.dim() != 2 && mask.dim() != 4) return false;
  const int64_t full[4] = {p.q.size(0), p.q.size(1), p.q.size(2), p.k.size(2)};
  for (int64_t d = 1; d <= mask.dim(); ++d) {
    if (mask.size(-d) != 1 && mask.size(-d) != full[4 - d]) return false;
  }
  return mask.scalar_type() == p.q.scalar_type() || mask.scalar_type() == at::kFloat;
}

}  // namespace

bool in_bf16(const Attention& p) {
  return p.q.scalar_type() == at::kBFloat16 && p.q.size(3) % 2 == 0 && multiplies_bf16();
}

const char* unsupported(const Attention& p) {
  const auto type = p.q.scalar_type();
  const bool known =
      type == at::kDouble || type == at::kFloat || type == at::kHalf || type == at::kBFloat16;
  if (!known || p.k.scalar_type() != type || p.v.scalar_type() != type) {
    return "dtype has no rounding threshold";
  }
  const bool shaped = p.q.dim() == 4 && p.k.dim() == 4 && p.v.dim() == 4 &&
      same_matrices(p.q, p.k) && same_matrices(p.k, p.v) && p.k.size(1) == p.v.size(1) &&
      p.k.size(2) == p.v.size(2) && p.q.size(3) > 0 &&
      (p.q.size(1) == 0 || (p.k.size(1) > 0 && p.q.size(1) % p.k.size(1) == 0));
  if (!shaped || (p.mask.has_value() && p.mask->numel() > 0 && !fits(*p.mask, p))) {
    return "shapes or mask that only torch's own kernel knows";
  }
  if (!multiplies(at::toOpMathType(type))) return "no GEMM kernel for tiles on this processor";
  return nullptr;
}

std::tuple<at::Tensor, at::Tensor> attention_forward(
    const Attention& given, const AttentionChecks& checks, AttentionReport& report) {
  const auto type = given.q.scalar_type(), accumulator = at::toOpMathType(type);
  Attention problem = given;
  for (at::Tensor* each : {&problem.q, &problem.k, &problem.v}) *each = each->to(accumulator);
  const Shapes shapes(problem, in_bf16(given));
  const auto options = problem.q.options();
  at::Tensor out = at::empty_like(problem.q);
  at::Tensor lse =
      at::empty({shapes.batches, shapes.queries, shapes.heads}, options).transpose(1, 2);
  if (accumulator == at::kDouble)
    forward<double>(problem, shapes, checks, out, lse, report);
  else
    forward<float>(problem, shapes, checks, out, lse, report);
  return {out.to(type), lse};
}

}  // namespace holdfast
