#include "int8_gemm/int8_gemm.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

#include "core/instruction_sets.h"

namespace holdfast {

namespace {

constexpr int64_t kBlockBytes = 512 * 1024;  // A block of accumulators, which stays in L2.
constexpr int64_t kFewestRows = 48, kMostRows = 384;  // The rows of a block.
constexpr int64_t kRowStep = 8;  // FBGEMM's kernels use each load of B for so many rows.
constexpr int64_t kWorkPerThread = 1
    << 20;  // In multiplications: starting a thread takes microseconds.

constexpr int64_t kWaits = 2000;  // All of these pauses together take microseconds.
constexpr int kLowBits = 7;  // 16 bits hold pairs of products of so few: 2 · 127 · 128 < 2^15.
constexpr int8_t kNarrow = 64;  // 16 bits hold pairs of products with B: 2 · 255 · 64 < 2^15.

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Returns how many rows a thread multiplies and finishes at a time. It is a thread's share of all
// rows if that is smaller than a block and gives every thread about as many.
int64_t rows_of_block(int64_t stride, int64_t rows, int64_t threads) {
  const int64_t most = kBlockBytes / (stride * static_cast<int64_t>(sizeof(int32_t)));
  const int64_t block = std::clamp(most / kRowStep * kRowStep, kFewestRows, kMostRows);
  const int64_t share = (rows + threads * kRowStep - 1) / (threads * kRowStep) * kRowStep;
  const bool even = share * threads <= rows + rows / 8;
  return even ? std::min(block, share) : block;
}

// The rows that are multiplied in place of those of A. Where FBGEMM would saturate (`split`) these
// are the lower seven bits of A followed by its highest bits, as A B = low B + 2^7 (high B).
class Factors {
 public:
  Factors(const uint8_t* a, int64_t rows, int64_t inner, bool split) : data_(a), rows_(rows) {
    if (!split) return;
    thread_local std::vector<uint8_t> memory;
    const size_t count = static_cast<size_t>(rows * inner);
    if (memory.size() < 2 * count) memory.resize(2 * count);
    for (size_t i = 0; i < count; ++i) memory[i] = a[i] & ((1 << kLowBits) - 1);
    for (size_t i = 0; i < count; ++i) memory[count + i] = a[i] >> kLowBits;
    data_ = memory.data();
    parts_ = 2;
  }
  const uint8_t* data() const { return data_; }
  int64_t rows() const { return parts_ * rows_; }

  // Makes the rows [begin, end) of the accumulators [rows(), stride] those of A B. They fit int32,
  // so overflows of the parts cancel in unsigned arithmetic.
  void join(int32_t* c, int64_t stride, int64_t begin, int64_t end) const {
    if (parts_ == 1) return;
    const int32_t* high = c + rows_ * stride;
    for (int64_t i = begin * stride; i < end * stride; ++i) {
      const uint32_t more = static_cast<uint32_t>(high[i]) << kLowBits;
      c[i] = static_cast<int32_t>(static_cast<uint32_t>(c[i]) + more);
    }
  }

 private:
  const uint8_t* data_;
  int64_t rows_, parts_ = 1;
};

bool any_wide(const at::Tensor& b) {
  const at::Tensor source = b.contiguous();
  const int8_t* data = source.data_ptr<int8_t>();
  return std::any_of(
      data, data + source.numel(), [](int8_t x) { return x < -kNarrow || x > kNarrow; });
}

int64_t threads_for(int64_t work) {
  if (at::in_parallel_region()) return 1;
  return std::clamp<int64_t>(work / kWorkPerThread, 1, at::get_num_threads());
}

void check_part(const char* name, const at::Tensor& part, at::ScalarType type, int64_t entries) {
  TORCH_CHECK_TYPE(part.scalar_type() == type, name, " is ", part.scalar_type(), ": give ", type);
  TORCH_CHECK_VALUE(
      part.dim() == 1 && part.numel() == entries && part.is_contiguous() && part.is_cpu(), name,
      " is ", part.sizes(), " on ", part.device(), ": give [", entries,
      "], contiguous, on the CPU");
}

void check_digits(const char* name, const at::Tensor& digits, int64_t fewest, int64_t inner) {
  TORCH_CHECK_TYPE(
      digits.scalar_type() == at::kChar, name, " is ", digits.scalar_type(), ": give int8");
  TORCH_CHECK_VALUE(
      digits.dim() == 2 && digits.size(0) >= fewest && digits.size(0) <= 3 &&
          digits.size(1) >= inner + kInt8Padding && digits.is_contiguous() && digits.is_cpu(),
      name, " is ", digits.sizes(), " on ", digits.device(), ": give [", fewest, " to 3, at least ",
      inner + kInt8Padding, "], contiguous, on the CPU");
}

// Checks everything whose size the kernels rely on.
Int8Settings checked(const at::Tensor& b, Int8Settings settings) {
  TORCH_CHECK_TYPE(b.scalar_type() == at::kChar, "b is ", b.scalar_type(), ": give int8");
  TORCH_CHECK_VALUE(
      b.dim() == 2 && b.numel() > 0 && b.is_cpu() && settings.columns > 0 &&
          b.size(1) == settings.columns + (settings.modular ? 1 : 0),
      "b is ", b.sizes(), " on ", b.device(), ": give [K, ", settings.columns,
      settings.modular ? " and a check column" : "", "] on the CPU");
  const int64_t entries = settings.columns + kInt8Padding;
  check_digits("digits", settings.digits, settings.modular ? 0 : 1, b.size(0));
  check_digits("ones", settings.ones, 1, b.size(0));
  check_part("column_sums", settings.column_sums, at::kInt, entries);
  check_part("b_scale", settings.b_scale, at::kFloat, entries);
  check_part("bias", settings.bias, at::kFloat, entries);
  if (settings.b_zero_point) check_part("b_zero_point", *settings.b_zero_point, at::kInt, entries);
  return settings;
}

const Int8Passes& chosen_passes() {
  const Int8Passes& chosen = beside_reductions<Int8Passes>({HOLDFAST_SETS(int8_passes)});
#if defined(__x86_64__)
  if (&chosen == &int8_passes_avx512 && runs("avx512vnni")) return int8_passes_avx512vnni;
#endif
  return chosen;
}

}  // namespace

const Int8Passes& int8_passes() {
  static const Int8Passes& passes = chosen_passes();
  return passes;
}

struct Int8Gemm::Suspects {
  std::mutex mutex;
  std::vector<int64_t> rows;
  std::vector<int32_t> accumulators;

  void add(int64_t row, const int32_t* c, int64_t width) {
    const std::lock_guard<std::mutex> lock(mutex);
    rows.push_back(row);
    accumulators.insert(accumulators.end(), c, c + width);
  }

  Int8Suspects taken(int64_t width) const {
    if (rows.empty()) return std::nullopt;
    return std::make_tuple(at::tensor(rows), at::tensor(accumulators).reshape({-1, width}));
  }
};

Int8Gemm::Int8Gemm(const at::Tensor& b, Int8Settings settings)
    : settings_(checked(b, std::move(settings))),
      b_(b),
      inner_(b_.rows()),
      width_(b_.columns()),
      stride_((width_ + 15) / 16 * 16),
      wide_(int8_saturates() && any_wide(b)) {}

bool Int8Gemm::saturates(const uint8_t* a, int64_t rows) const {
  if (!wide_) return false;
  uint8_t bits = 0;
  for (int64_t i = 0; i < rows * inner_; ++i) bits |= a[i];
  return bits >> kLowBits != 0;
}

void Int8Gemm::check(const at::Tensor& a, const at::Tensor& out) const {
  TORCH_CHECK_TYPE(a.scalar_type() == at::kByte, "a must be uint8, got ", a.scalar_type());
  const auto dtype = out.scalar_type();
  TORCH_CHECK_TYPE(
      dtype == at::kByte || dtype == at::kFloat || dtype == at::kBFloat16,
      "out must be uint8, float32 or bfloat16, got ", dtype);
  TORCH_CHECK_VALUE(a.is_cpu() && out.is_cpu(), "a and out must be on the CPU");
  TORCH_CHECK_VALUE(
      a.dim() == 2 && a.size(1) == inner_ && a.is_contiguous() && out.dim() == 2 &&
          out.size(0) == a.size(0) && out.size(1) == settings_.columns && out.is_contiguous(),
      "a ", a.sizes(), " and out ", out.sizes(), " must be contiguous, [M, ", inner_, "] and [M, ",
      settings_.columns, "]");
}

Int8Scales Int8Gemm::scales(
    double a_scale, int64_t a_zero_point, double out_scale, int64_t out_zero_point) const {
  TORCH_CHECK_VALUE(
      a_zero_point >= 0 && a_zero_point <= 255 && out_zero_point >= 0 && out_zero_point <= 255,
      "zero points ", a_zero_point, " and ", out_zero_point, " must be from 0 to 255");
  const int64_t count = settings_.columns + kInt8Padding;
  const at::Tensor shift = at::empty({count}, at::kInt);
  const at::Tensor scale = at::empty({count}, at::kFloat), addend = at::empty({count}, at::kFloat);
  const float of_a = static_cast<float>(a_scale);
  const float inverse = out_scale == 0 ? 1.0f : 1.0f / static_cast<float>(out_scale);
  const int32_t zero = static_cast<int32_t>(a_zero_point);
  const int32_t all = static_cast<int32_t>(inner_) * zero;
  const int32_t* sums = settings_.column_sums.data_ptr<int32_t>();
  const int32_t* zero_b =
      settings_.b_zero_point ? settings_.b_zero_point->data_ptr<int32_t>() : nullptr;
  const float* of_b = settings_.b_scale.data_ptr<float>();
  const float* bias = settings_.bias.data_ptr<float>();
  int32_t* to_shift = shift.data_ptr<int32_t>();
  float* to_scale = scale.data_ptr<float>();
  float* to_addend = addend.data_ptr<float>();
  for (int64_t j = 0; j < count; ++j) {
    to_shift[j] = zero * sums[j] - (zero_b == nullptr ? 0 : all * zero_b[j]);
    to_scale[j] = of_a * of_b[j] * inverse;
    to_addend[j] = bias[j] * inverse;
  }
  return {shift, scale, addend, a_scale, a_zero_point, out_scale, out_zero_point};
}

Int8Epilogue Int8Gemm::epilogue(const at::Tensor& out, const Int8Scales& scales) const {
  const auto& zero = settings_.b_zero_point;
  const auto dtype = out.scalar_type();
  TORCH_CHECK_VALUE(
      (dtype == at::kByte) == (scales.out_scale != 0),
      "an output scale is for uint8 and for nothing else, out is ", dtype);
  const int64_t entries = settings_.columns + kInt8Padding;
  TORCH_CHECK_VALUE(
      scales.shift.numel() == entries && scales.scale.numel() == entries &&
          scales.addend.numel() == entries,
      "scales of ", scales.shift.numel() - kInt8Padding, " columns: this matrix has ",
      settings_.columns, ", call its own scales()");
  return {
      scales.shift.data_ptr<int32_t>(),
      zero ? zero->data_ptr<int32_t>() : nullptr,
      scales.scale.data_ptr<float>(),
      scales.addend.data_ptr<float>(),
      static_cast<int32_t>(scales.out_zero_point),
      settings_.relu,
      dtype == at::kByte        ? Int8Output::u8
          : dtype == at::kFloat ? Int8Output::f32
                                : Int8Output::bf16};
}

bool Int8Gemm::holds(const int32_t* row, int64_t sum, int64_t predicted) const {
  return settings_.modular ? (sum - row[settings_.columns]) % 127 == 0 : sum == predicted;
}

void Int8Gemm::finish_rows(
    const int32_t* c, const uint8_t* a, int64_t begin, int64_t end, const Int8Epilogue& epilogue,
    void* out, Suspects* suspects) const {
  constexpr int64_t kRows = 64;
  const Int8Passes& passes = int8_passes();
  const at::Tensor &digits = settings_.digits, &ones = settings_.ones;
  const int64_t columns = settings_.columns;
  const int64_t size = epilogue.output == Int8Output::u8 ? 1
      : epilogue.output == Int8Output::f32               ? 4
                                                         : 2;
  int64_t a_sums[kRows], sums[kRows], predicted[kRows] = {};
  for (int64_t first = begin; first < end; first += kRows) {
    const int64_t rows = std::min(kRows, end - first);
    const uint8_t* of_a = a + first * inner_;
    if (suspects != nullptr && digits.size(0) > 0) {
      passes.predict(
          of_a, rows, inner_, digits.data_ptr<int8_t>(), digits.size(1), digits.size(0), predicted);
    }
    if (epilogue.b_zero_point != nullptr) {
      passes.predict(of_a, rows, inner_, ones.data_ptr<int8_t>(), ones.size(1), 1, a_sums);
    }
    const int32_t* block = c + (first - begin) * stride_;
    char* to = static_cast<char*>(out) + first * columns * size;
    passes.finish(
        {block, stride_, rows, columns, a_sums, to, columns}, epilogue,
        suspects != nullptr ? sums : nullptr);
    for (int64_t r = 0; suspects != nullptr && r < rows; ++r) {
      const int32_t* row = block + r * stride_;
      if (!holds(row, sums[r], predicted[r])) suspects->add(first + r, row, width_);
    }
  }
}

Int8Suspects Int8Gemm::multiply(
    const at::Tensor& a, const at::Tensor& out, const Int8Scales& scales, bool verify) const {
  check(a, out);
  const int64_t rows = a.size(0);
  const uint8_t* data = a.data_ptr<uint8_t>();
  const Int8Epilogue how = epilogue(out, scales);
  Suspects found;
  Suspects* suspects = verify ? &found : nullptr;
  const int64_t threads = threads_for(rows * width_ * inner_);
  const int64_t together = rows_of_block(stride_, rows, threads);
  const int64_t blocks = (rows + together - 1) / together;
  if (threads == 1 || blocks >= threads) {
    at::parallel_for(0, blocks, threads == 1 ? blocks : 1, [&](int64_t first, int64_t last) {
      for (int64_t block = first; block < last; ++block) {
        const int64_t begin = block * together, end = std::min(rows, begin + together);
        const uint8_t* of_block = data + begin * inner_;
        const Factors factors(of_block, end - begin, inner_, saturates(of_block, end - begin));
        int32_t* c = int8_accumulators(factors.rows() * stride_);
        b_.multiply(factors.data(), factors.rows(), c, stride_, 0, 1);
        factors.join(c, stride_, 0, end - begin);
        finish_rows(c, data, begin, end, how, out.data_ptr(), suspects);
      }
    });
  } else {
    // The threads share each row, so no row can be finished before all have multiplied. A thread
    // waits for that a while, and then leaves the rest to the slower ones. A second parallel region
    // would cost more.
    const Factors factors(data, rows, inner_, saturates(data, rows));
    int32_t* c = int8_accumulators(factors.rows() * stride_);
    std::atomic<int64_t> multiplied{0}, next{0};
    at::parallel_for(0, threads, 1, [&](int64_t first, int64_t last) {
      for (int64_t thread = first; thread < last; ++thread) {
        b_.multiply(factors.data(), factors.rows(), c, stride_, thread, threads);
      }
      multiplied += last - first;
      for (int64_t i = 0; i < kWaits && multiplied.load() < threads; ++i) pause();
      if (multiplied.load() < threads) return;
      for (int64_t row; (row = next++) < rows;) {
        factors.join(c, stride_, row, row + 1);
        finish_rows(c + row * stride_, data, row, row + 1, how, out.data_ptr(), suspects);
      }
    });
  }
  return found.taken(width_);
}

at::Tensor Int8Gemm::accumulate(const at::Tensor& a) const {
  TORCH_CHECK_VALUE(
      a.scalar_type() == at::kByte && a.dim() == 2 && a.size(1) == inner_ && a.is_contiguous(),
      "a must be contiguous uint8 [M, ", inner_, "], got ", a.scalar_type(), " ", a.sizes());
  TORCH_CHECK_VALUE(a.is_cpu(), "a must be on the CPU, it is on ", a.device());
  const int64_t rows = a.size(0);
  const uint8_t* data = a.data_ptr<uint8_t>();
  const Factors factors(data, rows, inner_, saturates(data, rows));
  const at::Tensor c = at::empty({factors.rows(), stride_}, a.options().dtype(at::kInt));
  b_.multiply(factors.data(), factors.rows(), c.data_ptr<int32_t>(), stride_, 0, 1);
  factors.join(c.data_ptr<int32_t>(), stride_, 0, rows);
  return c.narrow(0, 0, rows).narrow(1, 0, width_);
}

Int8Suspects Int8Gemm::finish(
    const at::Tensor& c, const at::Tensor& a, const at::Tensor& out, const Int8Scales& scales,
    bool verify) const {
  check(a, out);
  TORCH_CHECK_VALUE(
      c.scalar_type() == at::kInt && c.dim() == 2 && c.size(0) == a.size(0) &&
          c.stride(0) == stride_ && c.stride(1) == 1 && c.size(1) == width_,
      "c must be what accumulate returned");
  Suspects found;
  finish_rows(
      c.data_ptr<int32_t>(), a.data_ptr<uint8_t>(), 0, a.size(0), epilogue(out, scales),
      out.data_ptr(), verify ? &found : nullptr);
  return found.taken(width_);
}

void Int8Gemm::multiply_unprotected(
    const at::Tensor& a, const at::Tensor& out, const Int8Scales& scales) const {
  check(a, out);
  TORCH_CHECK_VALUE(
      width_ == settings_.columns && !settings_.b_zero_point && !settings_.relu &&
          out.scalar_type() == at::kByte,
      "the unprotected pipeline is here for comparison: uint8 out, no check column, no ReLU, no "
      "zero point of b");
  const int64_t rows = a.size(0);
  const Int8Requantised how{
      settings_.column_sums.data_ptr<int32_t>(),
      settings_.bias.data_ptr<float>(),
      scales.scale.data_ptr<float>()[0],
      static_cast<float>(scales.a_scale) * settings_.b_scale.data_ptr<float>()[0],
      static_cast<int32_t>(scales.a_zero_point),
      static_cast<int32_t>(scales.out_zero_point)};
  int32_t* c = int8_accumulators(rows * stride_);
  const int64_t threads = threads_for(rows * width_ * inner_);
  at::parallel_for(0, threads, 1, [&](int64_t first, int64_t last) {
    for (int64_t thread = first; thread < last; ++thread) {
      b_.multiply(a.data_ptr<uint8_t>(), rows, out.data_ptr<uint8_t>(), how, c, thread, threads);
    }
  });
}

}  // namespace holdfast
