#include "int8_gemm/packed.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#if __has_include(<fbgemm/Fbgemm.h>) && defined(__x86_64__)
#define HOLDFAST_FBGEMM
#include <fbgemm/Fbgemm.h>
#endif

namespace holdfast {

int32_t* int8_accumulators(int64_t count) {
  thread_local at::Tensor memory;
  if (!memory.defined() || memory.numel() < count) memory = at::empty({count}, at::kInt);
  return memory.data_ptr<int32_t>();
}

Int8Packed::~Int8Packed() = default;

at::Tensor Int8Packed::column(int64_t j) const {
  at::Tensor values = at::empty({rows_}, buffer_.options());
  for (int64_t k = 0; k < rows_; ++k) {
    values.data_ptr<int8_t>()[k] = buffer_.data_ptr<int8_t>()[address(k, j)];
  }
  return values;
}

#if defined(HOLDFAST_FBGEMM)

namespace {

using PackedA = fbgemm::PackAMatrix<uint8_t>;
using PackedB = fbgemm::PackBMatrix<int8_t>;

constexpr int64_t kLargestBuffer = (int64_t{1} << 31) - 1;  // FBGEMM counts bytes in an int.
constexpr int64_t kPadding = 512;  // FBGEMM pads an extent by less, as its blocks are no larger.

at::Tensor source_of(const at::Tensor& b) {
  TORCH_CHECK_VALUE(
      (b.size(0) + kPadding) * (b.size(1) + kPadding) <= kLargestBuffer, "B ", b.sizes(),
      " with up to ", kPadding, " more in each extent would take 2^31 bytes: split the layer");
  return b.contiguous();
}

PackedA packed(const uint8_t* a, int64_t rows, int64_t inner) {
  thread_local at::Tensor memory = at::empty({PackedA::packedBufferSize()}, at::kByte);
  return {fbgemm::matrix_op_t::NoTranspose, static_cast<int>(rows),    static_cast<int>(inner), a,
          static_cast<int>(inner),          memory.data_ptr<uint8_t>()};
}

}  // namespace

bool int8_available() { return fbgemm::fbgemmSupportedCPU(); }
// FBGEMM uses a narrower instruction set than the processor's if FBGEMM_ENABLE_INSTRUCTIONS says
// so.
bool int8_saturates() {
  const fbgemm::inst_set_t used = fbgemm::fbgemmInstructionSet();
  return used != fbgemm::inst_set_t::avx512_vnni && used != fbgemm::inst_set_t::avx512_vnni_ymm;
}

struct Int8Packed::Matrix {
  PackedB packed;
};

Int8Packed::Int8Packed(const at::Tensor& b) : rows_(b.size(0)), columns_(b.size(1)) {
  const int rows = static_cast<int>(rows_), columns = static_cast<int>(columns_);
  const at::Tensor source = source_of(b);
  buffer_ = at::zeros({PackedB::packedBufferSize(rows, columns)}, source.options());
  matrix_.reset(new Matrix{
      {fbgemm::matrix_op_t::NoTranspose, rows, columns, source.data_ptr<int8_t>(), columns,
       buffer_.data_ptr<int8_t>()}});
}

at::Tensor Int8Packed::unpack() const {
  at::Tensor b = at::empty({rows_, columns_}, buffer_.options());
  matrix_->packed.unpack(b.data_ptr<int8_t>());
  return b;
}

int64_t Int8Packed::address(int64_t k, int64_t j) const {
  TORCH_CHECK_INDEX(
      k >= 0 && k < rows_ && j >= 0 && j < columns_, "B[", k, ", ", j, "] is outside ", rows_,
      " x ", columns_);
  return matrix_->packed.addr(static_cast<int>(k), static_cast<int>(j));
}

void Int8Packed::multiply(
    const uint8_t* a, int64_t rows, int32_t* c, int64_t stride, int64_t thread,
    int64_t threads) const {
  PackedA of_a = packed(a, rows, rows_);
  fbgemm::DoNothing<int32_t, int32_t> nothing;
  const fbgemm::memCopy<> in_place(nothing);
  fbgemm::fbgemmPacked(
      of_a, matrix_->packed, c, c, static_cast<uint32_t>(stride), in_place,
      static_cast<int>(thread), static_cast<int>(threads));
}

void Int8Packed::multiply(
    const uint8_t* a, int64_t rows, uint8_t* out, const Int8Requantised& how, int32_t* c,
    int64_t thread, int64_t threads) const {
  using namespace fbgemm;
  PackedA of_a = packed(a, rows, rows_);
  const int32_t no_zero_point = 0;
  DoNothing<> nothing;
  const ReQuantizeOutput<false, QuantizationGranularity::TENSOR, float> requantise(
      nothing, &how.scale, how.zero_point, how.a_zero_point, &no_zero_point, nullptr,
      how.column_sums, how.bias, static_cast<uint32_t>(columns_), 1, &how.a_times_b_scale);
  fbgemmPacked(
      of_a, matrix_->packed, out, c, static_cast<uint32_t>(columns_), requantise,
      static_cast<int>(thread), static_cast<int>(threads));
}

#else

bool int8_available() { return false; }
bool int8_saturates() { return false; }

struct Int8Packed::Matrix {};

Int8Packed::Int8Packed(const at::Tensor& b) : rows_(b.size(0)), columns_(b.size(1)) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "this build has no FBGEMM: multiply by torch._int_mm");
}

at::Tensor Int8Packed::unpack() const { return {}; }
int64_t Int8Packed::address(int64_t, int64_t) const { return 0; }
void Int8Packed::multiply(const uint8_t*, int64_t, int32_t*, int64_t, int64_t, int64_t) const {}
void Int8Packed::multiply(
    const uint8_t*, int64_t, uint8_t*, const Int8Requantised&, int32_t*, int64_t, int64_t) const {}

#endif

}  // namespace holdfast
