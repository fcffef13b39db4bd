// The backward pass: for each pair of K and V, a loop over all tiles of the queries that read them,
// with every product checked.
#include <ATen/OpMathType.h>
#include <ATen/ops/empty.h>

#include <cmath>
#include <numeric>
#include <type_traits>

#include "attention/multiply.h"
#include "attention/tiles.h"

namespace holdfast {

namespace {

// The gradient of K or V, transposed tile by tile, and the checksums of its rows.
template <typename T>
struct Gradient {
  explicit Gradient(const Shapes& shapes)
      : values(shapes.padded_keys() * shapes.width),
        carry(shapes.key_tiles * shapes.width),
        spread(carry.size()),
        repeats(shapes.key_tiles),
        sums(2 * shapes.width) {}
  void clear() {
    values.clear();
    carry.clear();
    spread.clear();
    repeats.clear();
  }

  // Adds the checksums of a product whose right operand has these row sums and squares.
  void expect(
      int64_t tile, const Shapes& shapes, const T* left, int64_t rows, const T* signed_sums,
      const T* squares) {
    const int64_t width = shapes.width;
    sums.clear();
    tile_passes<T>().columns(
        left, rows, width, width, signed_sums, squares, sums.data(), sums.data() + width);
    for (int64_t k = 0; k < width; ++k) {
      carry[tile * width + k] += sums[k];
      spread[tile * width + k] += sums[width + k];
    }
    for (int64_t i = 1; i < rows; ++i) {
      const bool same = signed_sums[i] == signed_sums[i - 1] && squares[i] == squares[i - 1];
      repeats[tile] += same ? 1 : 0;
    }
  }

  Buffer<T> values;  // [tiles][width, padded columns]
  Buffer<double> carry, spread;  // [tiles, width]
  Buffer<double> repeats;  // [tiles], numbers of rows equal to their predecessor
  Buffer<T> sums;
};

using Row = GradientRow;

template <typename T>
struct BackwardScratch {
  BackwardScratch(const Attention& problem, const Shapes& s, bool with_mask)
      : keys(problem.k, s, true, true, Keep::matrix),
        values(problem.v, s, true, false, Keep::matrix),
        narrow_query(s.narrow ? kQueryTile * s.width : 0),
        narrow_grad(narrow_query.size()),
        narrow_query_transposed(narrow_query.size()),
        narrow_grad_transposed(narrow_query.size()),
        narrow_tile(s.narrow ? kQueryTile * s.stride() : 0),
        query(kQueryTile * s.width),
        grad(kQueryTile * s.width),
        out(kQueryTile * s.width),
        query_transposed(kQueryTile * s.width),
        grad_transposed(kQueryTile * s.width),
        grad_query(kQueryTile * s.width),
        scores(kQueryTile * s.stride()),
        gradients(kQueryTile * s.stride()),
        mask(with_mask ? kQueryTile * s.stride() : 0),
        rows(kGradientRows * kQueryTile),
        spread(kQueryTile),
        excused(kQueryTile),
        of_key(s),
        of_value(s) {}
  T* row(Row which) const { return row_of(rows.data(), which); }
  Operand<T> keys, values;
  Buffer<uint16_t> narrow_query, narrow_grad, narrow_query_transposed, narrow_grad_transposed;
  Buffer<uint16_t> narrow_tile;
  Buffer<T> query, grad, out, query_transposed, grad_transposed, grad_query, scores, gradients;
  Buffer<T> mask, rows;
  Buffer<double> spread;  // the statistic of dQ's threshold
  Buffer<uint8_t> excused;
  Gradient<T> of_key, of_value;
};

template <typename T>
class Backward {
  using S = BackwardScratch<T>;

 public:
  Backward(
      const Attention& problem, const Shapes& shapes, const at::Tensor& grad, const at::Tensor& out,
      const at::Tensor& lse, const AttentionChecks& checks, std::array<at::Tensor, 3> gradients)
      : problem_(problem),
        grad_(grad),
        forward_(out),
        lse_(lse),
        checks_(checks),
        shapes_(shapes),
        mask_(problem, c10::CppTypeToScalarType<T>::value),
        gradients_(std::move(gradients)) {}

  void run() {
    const int64_t tasks = shapes_.batches * shapes_.kv_heads;
    for_tasks(tasks, static_cast<bool>(checks_.probe), [&](int64_t first, int64_t last) {
      S scratch(problem_, shapes_, mask_.fills_scratch());
      for (int64_t matrix = first; matrix < last; ++matrix) {
        for (int64_t tile = 0; tile < shapes_.key_tiles; ++tile) {
          scratch.keys.read(matrix, tile);
          scratch.values.read(matrix, tile);
        }
        settle_matrix(matrix, scratch);
      }
      if (shapes_.narrow) end_multiplying();
    });
  }

  Findings& findings() { return findings_; }

 private:
  // Computes the gradients of one pair of K and V, and of the queries that read them, until they
  // pass their checks or two computations agree.
  void settle_matrix(int64_t matrix, S& scratch) {
    History history;
    for (int attempt = 0;; ++attempt) {
      history.pending.reset();
      history.attempt = attempt;
      const bool unchecked = attempt > kRecomputations;
      std::optional<Failure> failure = compute_matrix(matrix, scratch, history, unchecked);
      if (!failure) failure = history.pending;
      if (!failure) break;
      findings_.suspect();
      if (!history.first) {
        history.first = failure;
        history.repair = {*failure, Verdict::repaired};
      }
      if (attempt == kRecomputations) {
        history.decided = true;
        findings_.add({*history.first, Verdict::persistent});
      }
    }
    if (history.first && !history.decided) findings_.add(history.repair);
  }

  // The failures and results seen so far while one pair of tiles of K and V was computed.
  struct History {
    struct Result {
      Failure failure;
      std::vector<T> values;
      int attempt;
    };
    std::optional<Failure> first, pending;  // the first of all computations, and that of this one
    Finding repair{};
    int attempt = 0;  // the number of this computation
    bool decided = false;  // the first failure needs no report of a repair
    std::vector<Result> results;  // those that failed their check
  };

  static bool same_place(const Failure& left, const Failure& right) {
    const TilePlace &one = left.place, &other = right.place;
    return left.part == right.part && one.head == other.head &&
        one.query_tile == other.query_tile && one.key_tile == other.key_tile;
  }

  // Compares the result that failed first with its recomputation, and notes the first difference.
  static void compare(
      const Failure& here, const std::vector<T>& values, int64_t columns, History& history) {
    if (!history.first || !same_place(*history.first, here) || history.results.empty()) return;
    const auto& [failure, before, attempt] = history.results.front();
    if (!same_place(failure, here) || before.size() != values.size()) return;
    for (size_t i = 0; i < values.size(); ++i) {
      if (same_bits(&before[i], &values[i], 1)) continue;
      history.repair.row = static_cast<int64_t>(i) / columns;
      history.repair.column = static_cast<int64_t>(i) % columns;
      history.repair.corrupted = before[i];
      history.repair.repaired = values[i];
      return;
    }
  }

  std::optional<Failure> compute_matrix(
      int64_t matrix, S& scratch, History& history, bool unchecked) {
    scratch.of_key.clear();
    scratch.of_value.clear();
    const int64_t first_head = matrix % shapes_.kv_heads * shapes_.group;
    for (int64_t head = first_head; head < first_head + shapes_.group; ++head) {
      for (int64_t tile = 0; tile < shapes_.query_tiles; ++tile) {
        const TilePlace place{matrix / shapes_.kv_heads, head, tile, -1};
        if (auto failure = query_tile(place, matrix, scratch, history, unchecked)) return failure;
      }
    }
    for (auto* gradient : {&scratch.of_key, &scratch.of_value}) {
      finish_keys(*gradient, matrix, first_head, scratch, history, unchecked);
    }
    return std::nullopt;
  }

  void load_rows(const TilePlace& at, int64_t matrix, int64_t rows, S& s, bool unchecked) {
    const int64_t begin = at.query_tile * kQueryTile, width = shapes_.width;
    const int64_t padded = shapes_.padded_rows(rows);
    for (auto* each : {&s.query, &s.grad, &s.query_transposed, &s.grad_transposed}) each->clear();
    const auto load = [&](const at::Tensor& from, const Buffer<T>& to) {
      copy_rows(rows_view<T>(from, at.batch, at.head, begin), rows, width, to.data(), width);
    };
    load(problem_.q, s.query);
    load(grad_, s.grad);
    load(forward_, s.out);
    const TilePasses<T>& passes = tile_passes<T>();
    passes.transpose(s.query.data(), rows, width, width, s.query_transposed.data(), padded);
    passes.transpose(s.grad.data(), rows, width, width, s.grad_transposed.data(), padded);
    if constexpr (std::is_same_v<T, float>) {
      if (shapes_.narrow) {
        const auto narrow = [](const Buffer<T>& from, int64_t count, int64_t length, auto& to) {
          attention_passes().narrow_rows(from.data(), count, length, length, to.data(), length);
        };
        narrow(s.query, padded, width, s.narrow_query);
        narrow(s.grad, padded, width, s.narrow_grad);
        narrow(s.query_transposed, width, padded, s.narrow_query_transposed);
        narrow(s.grad_transposed, width, padded, s.narrow_grad_transposed);
      }
    }
    passes.inner(
        s.grad.data(), s.out.data(), rows, width, width, s.row(Row::delta), s.row(Row::delta_copy));
    const double unit = std::numeric_limits<T>::epsilon() / 2;
    const double most_key = std::sqrt(static_cast<double>(s.keys.largest_square(matrix)));
    const T* lse = lse_.data_ptr<T>() + at.batch * lse_.stride(0) + at.head * lse_.stride(1) +
        begin * lse_.stride(2);
    for (int64_t i = 0; i < rows; ++i) {
      double norm = 0;
      for (int64_t k = 0; k < width; ++k) {
        const double x = s.query[i * width + k];
        norm += x * x;
      }
      const T value = lse[i * lse_.stride(2)];
      const double reach = 1 + std::abs(static_cast<double>(value)) +
          std::abs(problem_.scale) * std::sqrt(norm) * most_key;
      const double slack = std::sqrt(std::sqrt(unit)) / 64 + 64 * unit * reach;
      s.row(Row::lse)[i] = value;
      s.row(Row::slack)[i] = static_cast<T>(slack);
      s.row(Row::most)[i] = static_cast<T>(std::exp(std::min(slack, 500.0)));
      s.excused[i] = unchecked || !checks_.verify ? 1 : 0;
    }
    for (auto which : {Row::p_total, Row::carry}) std::fill_n(s.row(which), kQueryTile, T(0));
    s.spread.clear();
  }

  std::optional<Failure> query_tile(
      const TilePlace& at, int64_t matrix, S& s, History& history, bool unchecked) {
    const int64_t rows = shapes_.rows_of(at.query_tile);
    load_rows(at, matrix, rows, s, unchecked);
    for (int64_t i = 0; i < rows; ++i) {
      if (s.excused[i] == 0 && !same_bits(s.row(Row::delta) + i, s.row(Row::delta_copy) + i, 1)) {
        if (excuse(at, matrix, i, s)) continue;
        return Failure{Wrong::state, "delta", at, i};
      }
    }
    const int64_t tiles = shapes_.tiles_seen(at.query_tile);
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const TilePlace place{at.batch, at.head, at.query_tile, tile};
      if (auto failure = key_tile(place, matrix, rows, s)) return failure;
    }
    finish_queries(at, matrix, rows, s, history);
    store_rows(at, rows, s);
    return std::nullopt;
  }

  std::optional<Failure> key_tile(const TilePlace& place, int64_t matrix, int64_t rows, S& s) {
    const int64_t tile = place.key_tile, columns = shapes_.columns_seen(place);
    const int64_t padded_rows = shapes_.padded_rows(rows), padded = shapes_.padded_seen(place);
    const auto product = [&](Wrong wrong, const Buffer<T>& a, const Buffer<uint16_t>& narrow_a,
                             const Buffer<T>& out, Operand<T>& operand, Row expected, Row limit,
                             const char* a_name, const char* b_name) -> TileProduct<T> {
      return {a.data(), narrow_a.data(), rows,   padded_rows,     out.data(),
              operand,  matrix,          place,  s.row(expected), s.row(limit),
              wrong,    a_name,          b_name, checks_.probe};
    };
    const TileProduct<T> scores = product(
        Wrong::scores, s.query, s.narrow_query, s.scores, s.keys, Row::expected_scores,
        Row::limit_scores, "q", "k");
    const TileProduct<T> gradients = product(
        Wrong::grad_probabilities, s.grad, s.narrow_grad, s.gradients, s.values,
        Row::expected_gradients, Row::limit_gradients, "grad_out", "v");
    for (const auto* product : {&scores, &gradients}) {
      compute(*product, shapes_);
      expect(*product, shapes_);
    }
    if (matrix == 0 && place.head == 0 && place.query_tile == 0 && tile == 0) {
      note_line(scores, shapes_, findings_);
    }
    const GradientTile<T> work{
        shapes_.narrow,
        rows,
        columns,
        padded,
        shapes_.stride(),
        s.scores.data(),
        s.gradients.data(),
        mask_.template tile<T>(place, rows, columns, s.mask.data()),
        dropout_of<T>(problem_, place),
        static_cast<T>(problem_.scale),
        signs_of<T>(kKeyTile),
        s.keys.row_sums(matrix, tile),
        s.rows.data(),
        s.excused.data()};
    for (int64_t row = 0, cleared_s = 0, cleared_g = 0;;) {
      const RowVerdict verdict = tile_passes<T>().gradient(work, row, cleared_s, cleared_g);
      if (verdict.wrong == Wrong::nothing) break;
      row = verdict.row;
      if (verdict.wrong == Wrong::scores) {
        cleared_s = settle(scores, shapes_, row, findings_);
      } else if (verdict.wrong == Wrong::grad_probabilities) {
        cleared_g = settle(gradients, shapes_, row, findings_);
      } else if (excuse(place, matrix, row, s)) {
        const int64_t stride = shapes_.stride();
        Buffer<T> fresh(padded_rows * stride);
        for (const auto* product : {&scores, &gradients}) {
          TileProduct<T> again = *product;
          again.out = fresh.data();
          compute(again, shapes_);
          std::copy_n(fresh.data() + row * stride, stride, product->out + row * stride);
        }
      } else {
        return Failure{verdict.wrong, "probabilities", place, row};
      }
    }
    strike_softmax(scores, work);
    if (auto failure = check_softmax(place, matrix, work, s)) return failure;
    for (const auto& [where, values] :
         {std::pair{Stage::probabilities, work.scores}, {Stage::grad_scores, work.gradients}}) {
      visit(checks_.probe, where, values, rows, columns, work.stride, scores, shapes_);
    }
    accumulate(place, matrix, scores, work, s);
    const double largest = s.keys.largest_spread(matrix, tile);
    for (int64_t i = 0; i < rows; ++i) s.spread[i] += largest * s.row(Row::s_square)[i];
    return std::nullopt;
  }

  // Lets a probe change gradients of the softmax, and updates the sums as the pass would have.
  void strike_softmax(const TileProduct<T>& product, const GradientTile<T>& work) const {
    visit_computed(
        checks_.probe, Stage::grad_softmax, work.gradients, work.rows, work.columns, work.stride,
        product, shapes_, [&](int64_t row, int64_t column, T before) {
          const T* ds = work.gradients + row * work.stride;
          const T change = ds[column] - before;
          work.row(Row::s_signed)[row] += change * work.signs[column];
          work.row(Row::s_square)[row] = std::inner_product(
              ds, ds + work.columns, ds, work.padded * std::numeric_limits<T>::min());
          work.row(Row::s_sum)[row] += change;
          work.row(Row::carry)[row] += change * work.key_sums[column];
        });
  }

  // Checks Σ_j dS_ij = Σ_j P_ij dP_ij − δ_i Σ_j P_ij up to the largest possible rounding error.
  std::optional<Failure> check_softmax(
      const TilePlace& place, int64_t matrix, const GradientTile<T>& work, S& s) {
    const double unit = std::numeric_limits<T>::epsilon() / 2;
    const double columns = static_cast<double>(work.columns);
    const double chain = static_cast<double>(work.padded) / (2.0 * tile_passes<T>().lanes) + 8;
    for (int64_t i = 0; i < work.rows; ++i) {
      if (work.excused[i] != 0) continue;
      const double lost = s.row(Row::delta_copy)[i] * static_cast<double>(work.row(Row::p_sum)[i]);
      const double expected = work.row(Row::p_dot)[i] - lost;
      // Overflow of dP was reported before; below, the sum of finite elements may overflow.
      if (!std::isfinite(expected)) continue;
      double magnitude = std::sqrt(columns * static_cast<double>(work.row(Row::s_square)[i]));
      if (!std::isfinite(magnitude)) magnitude = sum_of_magnitudes(work, i);
      if (std::isfinite(magnitude) && magnitude > std::numeric_limits<T>::max()) continue;
      const double limit = 2 * (chain + 4) * unit * (magnitude + std::abs(lost)) +
          8 * columns * std::numeric_limits<T>::min();
      if (std::isfinite(limit) && std::abs(work.row(Row::s_sum)[i] - expected) <= limit) continue;
      if (excuse(place, matrix, i, s)) continue;
      return Failure{Wrong::grad_scores, "grad_scores", place, i};
    }
    return std::nullopt;
  }

  static double sum_of_magnitudes(const GradientTile<T>& work, int64_t row) {
    const T* ds = work.gradients + row * work.stride;
    return std::accumulate(ds, ds + work.columns, 0.0, [](double sum, T x) {
      return sum + std::abs(static_cast<double>(x));
    });
  }

  // Adds a tile's products to dQ and to the transposed dK and dV.
  void accumulate(
      const TilePlace& place, int64_t matrix, const TileProduct<T>& scores,
      const GradientTile<T>& work, S& s) {
    const int64_t tile = place.key_tile, width = shapes_.width;
    const int64_t padded_rows = scores.padded_rows, columns = work.columns;
    T* of_value = s.of_value.values.data() + tile * kKeyTile * width;
    T* of_key = s.of_key.values.data() + tile * kKeyTile * width;
    const int64_t stride = shapes_.padded_columns(tile);
    add_pairs(
        s.grad_transposed, s.narrow_grad_transposed, padded_rows, work.scores, work.padded,
        of_value, stride, s);
    visit(checks_.probe, Stage::grad_value, of_value, width, columns, stride, scores, shapes_);
    add_pairs(
        s.query_transposed, s.narrow_query_transposed, padded_rows, work.gradients, work.padded,
        of_key, stride, s);
    visit(checks_.probe, Stage::grad_key, of_key, width, columns, stride, scores, shapes_);
    add_product(
        work.gradients, padded_rows, work.padded, s.narrow_tile.data(), s.keys, matrix, tile,
        shapes_, s.grad_query.data());
    visit(
        checks_.probe, Stage::grad_query, s.grad_query.data(), work.rows, width, width, scores,
        shapes_);
    s.of_value.expect(
        tile, shapes_, s.grad.data(), work.rows, work.row(Row::p_signed), work.row(Row::p_square));
    s.of_key.expect(
        tile, shapes_, s.query.data(), work.rows, work.row(Row::s_signed), work.row(Row::s_square));
  }

  // Computes dKᵀ += Qᵀ dS or dVᵀ += dOᵀ D, whose rows are `sum_stride` apart.
  void add_pairs(
      const Buffer<T>& left, const Buffer<uint16_t>& narrow_left, int64_t padded_rows,
      const T* right, int64_t padded, T* sum, int64_t sum_stride, S& s) {
    const int64_t width = shapes_.width, stride = shapes_.stride();
    if constexpr (std::is_same_v<T, float>) {
      if (shapes_.narrow) {
        uint16_t* pairs = s.narrow_tile.data();
        attention_passes().narrow_pairs(right, padded_rows, padded, stride, pairs, stride);
        multiply(
            width, padded, padded_rows, narrow_left.data(), padded_rows, pairs, stride, sum,
            sum_stride, true);
        return;
      }
    }
    multiply(
        width, padded, padded_rows, left.data(), padded_rows, right, stride, sum, sum_stride, true);
  }

  // Returns true if inputs that are not finite, or overflow, explain a row, which needs no check
  // then.
  bool excuse(const TilePlace& place, int64_t matrix, int64_t row, S& s) {
    const char* part = nullptr;
    const auto bad = [&](const Buffer<T>& from) {
      const T* values = from.data() + row * shapes_.width;
      return !std::all_of(values, values + shapes_.width, [](T x) { return std::isfinite(x); });
    };
    if (bad(s.query))
      part = "q";
    else if (bad(s.grad))
      part = "grad_out";
    else if (bad(s.out))
      part = "out";
    else if (!std::isfinite(s.row(Row::lse)[row]))
      part = "logsumexp";
    else if (!std::isfinite(s.row(Row::delta)[row]))
      part = "delta";
    const int64_t tiles = shapes_.tiles_seen(place.query_tile);
    for (int64_t tile = 0; tile < tiles && part == nullptr; ++tile) {
      const TilePlace at{place.batch, place.head, place.query_tile, tile};
      const int64_t columns = shapes_.columns_seen(at);
      if (mask_.template strange<T>(at, row, columns))
        part = "mask";
      else if (!s.keys.finite(matrix, tile, columns))
        part = "k";
      else if (!s.values.finite(matrix, tile, columns))
        part = "v";
    }
    if (part == nullptr) return false;
    findings_.add({{Wrong::probabilities, part, place, row}, Verdict::nonfinite});
    s.excused[row] = 1;
    return true;
  }

  // Scales dQ and compares it with its checksum; also checks that the rows of P sum to 1.
  void finish_queries(const TilePlace& at, int64_t matrix, int64_t rows, S& s, History& history) {
    const T scale = static_cast<T>(problem_.scale);
    if (shapes_.tiles_seen(at.query_tile) == 0) s.grad_query.clear();
    std::fill_n(s.row(Row::factor), rows, scale);
    const std::vector<T> before(s.grad_query.data(), s.grad_query.data() + rows * shapes_.width);
    compare({Wrong::accumulator, "grad_query", at, 0}, before, shapes_.width, history);
    tile_passes<T>().finish(
        s.grad_query.data(), rows, shapes_.width, shapes_.width, s.row(Row::factor),
        signs_of<T>(shapes_.width), s.row(Row::sums), s.row(Row::energies), nullptr, nullptr);
    const TileBound<T> bound(shapes_.keys, shapes_.width);
    const double growth = s.keys.row_growth(matrix);
    for (int64_t i = 0; i < rows; ++i) {
      if (s.excused[i] != 0) continue;
      const double total = s.row(Row::p_total)[i];
      const bool empty = total == 0 && !(s.row(Row::lse)[i] > 0 || s.row(Row::lse)[i] < 0);
      // An error of the logsumexp moves the logarithm of the sum.
      const bool one = 1 - total <= s.row(Row::slack)[i] && total <= s.row(Row::most)[i];
      if (!empty && !one) {
        if (excuse(at, matrix, i, s)) continue;
        // The sum is below 1 if only some keys are given, but the logsumexp is that of all keys.
        const Verdict if_so = total < 1 ? Verdict::dismissed : Verdict::operand;
        const T* totals = s.row(Row::p_total);
        suspect(
            {Wrong::probabilities, "logsumexp", at, i}, std::vector<T>(totals, totals + rows),
            history, if_so);
      }
      const double residual =
          s.row(Row::sums)[i] - static_cast<double>(scale) * s.row(Row::carry)[i];
      const double spread = static_cast<double>(scale) * scale * s.spread[i];
      const double energy = s.row(Row::energies)[i];
      if (accepted(bound, residual, spread, growth, energy)) continue;
      if (excuse(at, matrix, i, s)) continue;
      const Failure failure{Wrong::accumulator, "grad_query", at, i};
      const Chain<T> chain(shapes_.keys, kKeyTile);
      const double worst = bound.worst(chain.steps, spread / chain.walk, energy);
      suspect(failure, before, history, verdict_of(residual, worst));
    }
  }

  static bool accepted(
      const TileBound<T>& bound, double residual, double spread, double growth, double energy) {
    const double limit = bound(spread, growth, energy);
    return std::isfinite(limit) && std::abs(residual) <= limit;
  }

  // Handles a result that failed: one that repeats gets the verdict `if_so`, another is recomputed.
  void suspect(
      const Failure& failure, const std::vector<T>& values, History& history, Verdict if_so) {
    bool noted = false;
    for (const auto& [known, earlier, attempt] : history.results) {
      if (!same_place(known, failure) || earlier.size() != values.size()) continue;
      if (same_bits(earlier.data(), values.data(), static_cast<int64_t>(values.size()))) {
        noted = attempt == history.attempt;
        if (noted) break;  // this computation failed before, in another row
        if (same_place(*history.first, failure)) history.decided = true;
        findings_.add({failure, if_so});
        return;
      }
    }
    if (!noted) history.results.push_back({failure, values, history.attempt});
    if (!history.pending) history.pending = failure;
  }

  static Verdict verdict_of(double residual, double worst) {
    return std::abs(residual) <= worst ? Verdict::dismissed : Verdict::persistent;
  }

  // Checks and stores dK or dV, row by row of its transposed tiles.
  void finish_keys(
      Gradient<T>& gradient, int64_t matrix, int64_t head, S& s, History& history, bool unchecked) {
    const bool of_key = &gradient == &s.of_key;
    const double scale = of_key ? problem_.scale : 1;
    const int64_t width = shapes_.width, inner = shapes_.queries * shapes_.group;
    const Chain<T> chain(inner, kQueryTile);
    Buffer<T> rows(3 * width);
    for (int64_t tile = 0; tile < shapes_.key_tiles; ++tile) {
      const int64_t padded = shapes_.padded_columns(tile), columns = shapes_.columns_of(tile);
      T* values = gradient.values.data() + tile * kKeyTile * width;
      const std::vector<T> before(values, values + width * padded);
      const char* part = of_key ? "grad_key" : "grad_value";
      const TilePlace place{matrix / shapes_.kv_heads, head, -1, tile};
      compare({Wrong::accumulator, part, place, 0}, before, padded, history);
      std::fill_n(rows.data(), width, static_cast<T>(scale));
      tile_passes<T>().finish(
          values, width, padded, padded, rows.data(), signs_of<T>(padded), rows.data() + width,
          rows.data() + 2 * width, nullptr, nullptr);
      const TileBound<T> bound(inner, columns);
      const double growth = chain.growth(gradient.repeats[tile] / static_cast<double>(inner));
      for (int64_t k = 0; k < width && checks_.verify && !unchecked; ++k) {
        const double residual = rows[width + k] - scale * gradient.carry[tile * width + k];
        const double spread = scale * scale * chain.walk * gradient.spread[tile * width + k];
        const double energy = rows[2 * width + k];
        if (accepted(bound, residual, spread, growth, energy)) continue;
        if (nonfinite_inputs(matrix, head, s)) break;
        const Failure failure{Wrong::accumulator, part, place, k};
        const double worst = bound.worst(chain.steps, spread / chain.walk, energy);
        suspect(failure, before, history, verdict_of(residual, worst));
      }
      store_keys(of_key ? gradients_[1] : gradients_[2], matrix, tile, values, padded);
    }
  }

  // Returns true if inputs of this pair's gradients are not finite or overflow.
  bool nonfinite_inputs(int64_t matrix, int64_t head, S& s) {
    const int64_t batch = matrix / shapes_.kv_heads;
    for (int64_t h = head; h < head + shapes_.group; ++h) {
      for (int64_t tile = 0; tile < shapes_.query_tiles; ++tile) {
        const TilePlace place{batch, h, tile, -1};
        const int64_t rows = shapes_.rows_of(tile);
        load_rows(place, matrix, rows, s, false);
        for (int64_t i = 0; i < rows; ++i) {
          if (excuse(place, matrix, i, s)) return true;
        }
      }
    }
    return false;
  }

  void store_rows(const TilePlace& at, int64_t rows, const S& s) const {
    const int64_t begin = at.query_tile * kQueryTile, width = shapes_.width;
    const RowsView<T> to = rows_view<T>(gradients_[0], at.batch, at.head, begin);
    for (int64_t i = 0; i < rows; ++i) {
      std::copy_n(s.grad_query.data() + i * width, width, to.data + i * to.row_stride);
    }
  }

  void store_keys(
      const at::Tensor& to, int64_t matrix, int64_t tile, const T* values, int64_t padded) const {
    const RowsView<T> rows =
        rows_view<T>(to, matrix / shapes_.kv_heads, matrix % shapes_.kv_heads, tile * kKeyTile);
    tile_passes<T>().transpose(
        values, shapes_.width, shapes_.columns_of(tile), padded, rows.data, rows.row_stride);
  }

  const Attention& problem_;
  const at::Tensor &grad_, &forward_, &lse_;
  const AttentionChecks& checks_;
  Shapes shapes_;
  Mask mask_;
  std::array<at::Tensor, 3> gradients_;
  Findings findings_;
};

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_backward(
    const Attention& given, const at::Tensor& grad, const at::Tensor& out, const at::Tensor& lse,
    const AttentionChecks& checks, AttentionReport& report) {
  const auto type = given.q.scalar_type(), accumulator = at::toOpMathType(type);
  Attention problem = given;
  for (at::Tensor* each : {&problem.q, &problem.k, &problem.v}) *each = each->to(accumulator);
  const Shapes shapes(problem, in_bf16(given));
  const at::Tensor grad_wide = grad.to(accumulator), out_wide = out.to(accumulator);
  const at::Tensor lse_wide = lse.to(accumulator);
  std::array<at::Tensor, 3> gradients;
  const std::array<at::Tensor, 3> of{problem.q, problem.k, problem.v};
  for (size_t i = 0; i < 3; ++i) {
    const auto& t = of[i];
    gradients[i] =
        at::empty({t.size(0), t.size(2), t.size(1), t.size(3)}, t.options()).transpose(1, 2);
  }
  const auto run = [&](auto& backward) {
    backward.run();
    backward.findings().finish(report);
  };
  if (problem.k.size(2) == 0 || problem.q.numel() == 0) {
    for (auto& each : gradients) each.zero_();
  } else if (accumulator == at::kDouble) {
    Backward<double> backward(problem, shapes, grad_wide, out_wide, lse_wide, checks, gradients);
    run(backward);
  } else {
    Backward<float> backward(problem, shapes, grad_wide, out_wide, lse_wide, checks, gradients);
    run(backward);
  }
  return {gradients[0].to(type), gradients[1].to(type), gradients[2].to(type)};
}

}  // namespace holdfast
