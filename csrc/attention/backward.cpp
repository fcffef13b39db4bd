// Backward: for each pair of K and V all tiles of all queries that read them, checked as it goes.
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
  Buffer<double> repeats;  // rows that repeat their predecessor, [tiles]
  Buffer<T> sums;
};

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
        rows(kRows * kQueryTile),
        spread(kQueryTile),
        excused(kQueryTile),
        of_key(s),
        of_value(s) {}
  enum Row {
    expected_s,
    limit_s,
    expected_g,
    limit_g,
    lse,
    delta,
    delta_copy,
    most,
    slack,
    p_signed,
    p_square,
    s_signed,
    s_square,
    p_sum,
    s_sum,
    p_dot,
    p_total,
    carry,
    factor,
    sums,
    energies,
    kRows
  };
  T* row(Row which) const { return rows.data() + which * kQueryTile; }
  Operand<T> keys, values;
  Buffer<uint16_t> narrow_query, narrow_grad, narrow_query_transposed, narrow_grad_transposed;
  Buffer<uint16_t> narrow_tile;
  Buffer<T> query, grad, out, query_transposed, grad_transposed, grad_query, scores, gradients;
  Buffer<T> mask, rows;
  Buffer<double> spread;  // of dQ
  Buffer<uint8_t> excused;
  Gradient<T> of_key, of_value;
};

template <typename T>
class Backward {
  using S = BackwardScratch<T>;

  struct Failure {
    Wrong wrong;
    const char* part;
    int64_t head, query_tile, key_tile, row;
  };

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
  // pass, or two computations agree.
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
        history.repair = finding_of(*failure, matrix, Verdict::repaired);
      }
      if (attempt == kRecomputations) {
        history.decided = true;
        findings_.add(finding_of(*history.first, matrix, Verdict::persistent));
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
    std::optional<Failure> first, pending;  // ever, and of this computation
    Finding repair{};
    int attempt = 0;  // the number of this computation
    bool decided = false;  // the first failure is no fault that was repaired
    std::vector<Result> results;  // that failed
  };

  static bool same_place(const Failure& left, const Failure& right) {
    return left.part == right.part && left.head == right.head &&
        left.query_tile == right.query_tile && left.key_tile == right.key_tile;
  }

  Finding finding_of(const Failure& f, int64_t matrix, Verdict verdict) const {
    const int64_t batch = matrix / shapes_.kv_heads;
    return {verdict, f.wrong, f.part, batch, f.head, f.query_tile, f.key_tile, f.row};
  }

  // The result that failed first, computed again: the first element that differs.
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
        s.grad.data(), s.out.data(), rows, width, width, s.row(S::delta), s.row(S::delta_copy));
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
      s.row(S::lse)[i] = value;
      s.row(S::slack)[i] = static_cast<T>(slack);
      s.row(S::most)[i] = static_cast<T>(std::exp(std::min(slack, 500.0)));
      s.excused[i] = unchecked || !checks_.verify ? 1 : 0;
    }
    for (auto which : {S::p_total, S::carry}) std::fill_n(s.row(which), kQueryTile, T(0));
    s.spread.clear();
  }

  std::optional<Failure> query_tile(
      const TilePlace& at, int64_t matrix, S& s, History& history, bool unchecked) {
    const int64_t rows = shapes_.rows_of(at.query_tile);
    load_rows(at, matrix, rows, s, unchecked);
    for (int64_t i = 0; i < rows; ++i) {
      if (s.excused[i] == 0 && !same_bits(s.row(S::delta) + i, s.row(S::delta_copy) + i, 1)) {
        if (excuse(at, matrix, i, s)) continue;
        return Failure{Wrong::state, "delta", at.head, at.query_tile, -1, i};
      }
    }
    const int64_t tiles = shapes_.tiles_seen(at.query_tile, problem_.causal);
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const TilePlace place{at.batch, at.head, at.query_tile, tile};
      if (auto failure = key_tile(place, matrix, rows, s)) return failure;
    }
    finish_queries(at, matrix, rows, s, history);
    store_rows(at, rows, s);
    return std::nullopt;
  }

  std::optional<Failure> key_tile(const TilePlace& place, int64_t matrix, int64_t rows, S& s) {
    const int64_t tile = place.key_tile, columns = shapes_.columns_of(tile);
    const int64_t padded_rows = shapes_.padded_rows(rows), padded = shapes_.padded_columns(tile);
    const TileProduct<T> scores{
        s.query.data(),
        s.narrow_query.data(),
        rows,
        padded_rows,
        s.scores.data(),
        s.keys,
        matrix,
        place,
        s.row(S::expected_s),
        s.row(S::limit_s),
        Wrong::scores,
        "q",
        "k",
        checks_.probe};
    const TileProduct<T> gradients{
        s.grad.data(),
        s.narrow_grad.data(),
        rows,
        padded_rows,
        s.gradients.data(),
        s.values,
        matrix,
        place,
        s.row(S::expected_g),
        s.row(S::limit_g),
        Wrong::grad_probabilities,
        "grad_out",
        "v",
        checks_.probe};
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
        static_cast<T>(problem_.scale),
        signs_of<T>(kKeyTile),
        s.row(S::expected_s),
        s.row(S::limit_s),
        s.row(S::expected_g),
        s.row(S::limit_g),
        s.row(S::lse),
        s.row(S::delta),
        s.row(S::most),
        s.keys.row_sums(matrix, tile),
        s.row(S::p_signed),
        s.row(S::p_square),
        s.row(S::s_signed),
        s.row(S::s_square),
        s.row(S::p_sum),
        s.row(S::s_sum),
        s.row(S::p_dot),
        s.row(S::p_total),
        s.row(S::carry),
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
        return Failure{verdict.wrong, "probabilities", place.head, place.query_tile, tile, row};
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
    for (int64_t i = 0; i < rows; ++i) s.spread[i] += largest * s.row(S::s_square)[i];
    return std::nullopt;
  }

  // What the pass would have made of gradients of the softmax that it computed wrong.
  void strike_softmax(const TileProduct<T>& product, const GradientTile<T>& work) const {
    visit_computed(
        checks_.probe, Stage::grad_softmax, work.gradients, work.rows, work.columns, work.stride,
        product, shapes_, [&](int64_t row, int64_t column, T before) {
          const T* ds = work.gradients + row * work.stride;
          const T change = ds[column] - before;
          work.s_signed[row] += change * work.signs[column];
          work.s_square[row] = std::inner_product(
              ds, ds + work.columns, ds, work.padded * std::numeric_limits<T>::min());
          work.s_sum[row] += change;
          work.carry[row] += change * work.key_sums[column];
        });
  }

  // Σ_j dS_ij = Σ_j P_ij dP_ij − δ_i Σ_j P_ij to within rounding at its worst.
  std::optional<Failure> check_softmax(
      const TilePlace& place, int64_t matrix, const GradientTile<T>& work, S& s) {
    const double unit = std::numeric_limits<T>::epsilon() / 2;
    const double columns = static_cast<double>(work.columns);
    const double chain = static_cast<double>(work.padded) / (2.0 * tile_passes<T>().lanes) + 8;
    for (int64_t i = 0; i < work.rows; ++i) {
      if (work.excused[i] != 0) continue;
      const double lost = s.row(S::delta_copy)[i] * static_cast<double>(work.p_sum[i]);
      const double expected = work.p_dot[i] - lost;
      // dP overflows, which was settled; or, below, finite elements do in their sum.
      if (!std::isfinite(expected)) continue;
      double magnitude = std::sqrt(columns * static_cast<double>(work.s_square[i]));
      if (!std::isfinite(magnitude)) magnitude = sum_of_magnitudes(work, i);
      if (std::isfinite(magnitude) && magnitude > std::numeric_limits<T>::max()) continue;
      const double limit = 2 * (chain + 4) * unit * (magnitude + std::abs(lost)) +
          8 * columns * std::numeric_limits<T>::min();
      if (std::isfinite(limit) && std::abs(work.s_sum[i] - expected) <= limit) continue;
      if (excuse(place, matrix, i, s)) continue;
      return Failure{Wrong::grad_scores, "grad_scores",  place.head,
                     place.query_tile,   place.key_tile, i};
    }
    return std::nullopt;
  }

  static double sum_of_magnitudes(const GradientTile<T>& work, int64_t row) {
    const T* ds = work.gradients + row * work.stride;
    return std::accumulate(ds, ds + work.columns, 0.0, [](double sum, T x) {
      return sum + std::abs(static_cast<double>(x));
    });
  }

  // The three products of a tile that add up: dQ, and dK and dV transposed.
  void accumulate(
      const TilePlace& place, int64_t matrix, const TileProduct<T>& scores,
      const GradientTile<T>& work, S& s) {
    const int64_t tile = place.key_tile, width = shapes_.width;
    const int64_t padded_rows = scores.padded_rows, columns = work.columns;
    T* of_value = s.of_value.values.data() + tile * kKeyTile * width;
    T* of_key = s.of_key.values.data() + tile * kKeyTile * width;
    add_pairs(
        s.grad_transposed, s.narrow_grad_transposed, padded_rows, work.scores, work.padded,
        of_value, s);
    visit(checks_.probe, Stage::grad_value, of_value, width, columns, work.padded, scores, shapes_);
    add_pairs(
        s.query_transposed, s.narrow_query_transposed, padded_rows, work.gradients, work.padded,
        of_key, s);
    visit(checks_.probe, Stage::grad_key, of_key, width, columns, work.padded, scores, shapes_);
    add_product(
        work.gradients, padded_rows, s.narrow_tile.data(), s.keys, matrix, tile, shapes_,
        s.grad_query.data());
    visit(
        checks_.probe, Stage::grad_query, s.grad_query.data(), work.rows, width, width, scores,
        shapes_);
    s.of_value.expect(tile, shapes_, s.grad.data(), work.rows, work.p_signed, work.p_square);
    s.of_key.expect(tile, shapes_, s.query.data(), work.rows, work.s_signed, work.s_square);
  }

  // dKᵀ += Qᵀ dS, or dVᵀ += dOᵀ P
  void add_pairs(
      const Buffer<T>& left, const Buffer<uint16_t>& narrow_left, int64_t padded_rows,
      const T* right, int64_t padded, T* sum, S& s) {
    const int64_t width = shapes_.width, stride = shapes_.stride();
    if constexpr (std::is_same_v<T, float>) {
      if (shapes_.narrow) {
        uint16_t* pairs = s.narrow_tile.data();
        attention_passes().narrow_pairs(right, padded_rows, padded, stride, pairs, stride);
        multiply(
            width, padded, padded_rows, narrow_left.data(), padded_rows, pairs, stride, sum, padded,
            true);
        return;
      }
    }
    multiply(
        width, padded, padded_rows, left.data(), padded_rows, right, stride, sum, padded, true);
  }

  // Whether inputs that are not finite, or overflow, make a row what it is: it is checked no more.
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
    else if (!std::isfinite(s.row(S::lse)[row]))
      part = "logsumexp";
    else if (!std::isfinite(s.row(S::delta)[row]))
      part = "delta";
    for (int64_t tile = 0; tile < shapes_.key_tiles && part == nullptr; ++tile) {
      const TilePlace at{place.batch, place.head, place.query_tile, tile};
      if (mask_.template strange<T>(at, row, shapes_.columns_of(tile)))
        part = "mask";
      else if (!s.keys.finite(matrix, tile))
        part = "k";
      else if (!s.values.finite(matrix, tile))
        part = "v";
    }
    if (part == nullptr) return false;
    findings_.add(
        {Verdict::nonfinite, Wrong::probabilities, part, place.batch, place.head, place.query_tile,
         place.key_tile, row});
    s.excused[row] = 1;
    return true;
  }

  // dQ: scaled, and compared with what was carried along; the rows of P must have summed to 1.
  void finish_queries(const TilePlace& at, int64_t matrix, int64_t rows, S& s, History& history) {
    const T scale = static_cast<T>(problem_.scale);
    if (shapes_.tiles_seen(at.query_tile, problem_.causal) == 0) s.grad_query.clear();
    std::fill_n(s.row(S::factor), rows, scale);
    const std::vector<T> before(s.grad_query.data(), s.grad_query.data() + rows * shapes_.width);
    const Failure whole{Wrong::accumulator, "grad_query", at.head, at.query_tile, -1, 0};
    compare(whole, before, shapes_.width, history);
    tile_passes<T>().finish(
        s.grad_query.data(), rows, shapes_.width, shapes_.width, s.row(S::factor),
        signs_of<T>(shapes_.width), s.row(S::sums), s.row(S::energies), nullptr, nullptr);
    const TileBound<T> bound(shapes_.keys, shapes_.width);
    const double growth = s.keys.row_growth(matrix);
    for (int64_t i = 0; i < rows; ++i) {
      if (s.excused[i] != 0) continue;
      const double total = s.row(S::p_total)[i];
      const bool empty = total == 0 && !(s.row(S::lse)[i] > 0 || s.row(S::lse)[i] < 0);
      if (!empty && !(std::abs(total - 1) <= s.row(S::slack)[i])) {
        if (excuse(at, matrix, i, s)) continue;
        // A smaller sum is that of a part of the keys, with the logarithm of all of them.
        const Verdict if_so = total < 1 ? Verdict::dismissed : Verdict::operand;
        const T* totals = s.row(S::p_total);
        suspect(
            {Wrong::probabilities, "logsumexp", at.head, at.query_tile, -1, i}, matrix,
            std::vector<T>(totals, totals + rows), history, if_so);
      }
      const double residual = s.row(S::sums)[i] - static_cast<double>(scale) * s.row(S::carry)[i];
      const double spread = static_cast<double>(scale) * scale * s.spread[i];
      const double energy = s.row(S::energies)[i];
      if (accepted(bound, residual, spread, growth, energy)) continue;
      if (excuse(at, matrix, i, s)) continue;
      const Failure failure{Wrong::accumulator, "grad_query", at.head, at.query_tile, -1, i};
      const Chain<T> chain(shapes_.keys, kKeyTile);
      const double worst = bound.worst(chain.steps, spread / chain.walk, energy);
      suspect(failure, matrix, before, history, verdict_of(residual, worst));
    }
  }

  static bool accepted(
      const TileBound<T>& bound, double residual, double spread, double growth, double energy) {
    const double limit = bound(spread, growth, energy);
    return std::isfinite(limit) && std::abs(residual) <= limit;
  }

  // A result that is off: if it repeats, `if_so` is what it is; else all is computed again.
  void suspect(
      const Failure& failure, int64_t matrix, const std::vector<T>& values, History& history,
      Verdict if_so) {
    bool noted = false;
    for (const auto& [known, earlier, attempt] : history.results) {
      if (!same_place(known, failure) || earlier.size() != values.size()) continue;
      if (same_bits(earlier.data(), values.data(), static_cast<int64_t>(values.size()))) {
        noted = attempt == history.attempt;
        if (noted) break;  // just now, for another row of it
        if (same_place(*history.first, failure)) history.decided = true;
        findings_.add(finding_of(failure, matrix, if_so));
        return;
      }
    }
    if (!noted) history.results.push_back({failure, values, history.attempt});
    if (!history.pending) history.pending = failure;
  }

  static Verdict verdict_of(double residual, double worst) {
    return std::abs(residual) <= worst ? Verdict::dismissed : Verdict::persistent;
  }

  // dK or dV, row by row of its transposed tiles.
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
      compare({Wrong::accumulator, part, head, -1, tile, 0}, before, padded, history);
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
        const Failure failure{Wrong::accumulator, part, head, -1, tile, k};
        const double worst = bound.worst(chain.steps, spread / chain.walk, energy);
        suspect(failure, matrix, before, history, verdict_of(residual, worst));
      }
      store_keys(of_key ? gradients_[1] : gradients_[2], matrix, tile, values, padded);
    }
  }

  // Looks through all that reaches the gradients of this pair of K and V.
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
