#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <memory>
#include <optional>
#include <utility>

#include "core/interception_state.h"
#include "core/sites.h"
#include "gemm/intercept.h"

namespace holdfast {

namespace {

using c10::DispatchKey;

struct Product {
  const char* name;  // with namespace and overload
  DispatchKey key;
  Op op;  // the name in the report
};

constexpr Product kProducts[] = {
    {"aten::_int_mm", DispatchKey::CPU, Op::int_mm},
    {"aten::_int_mm.out", DispatchKey::CPU, Op::int_mm},
    {"aten::_scaled_mm", DispatchKey::CPU, Op::scaled_mm},
    {"aten::_scaled_mm.out", DispatchKey::CPU, Op::scaled_mm},
    {"aten::_scaled_mm_v2", DispatchKey::CPU, Op::scaled_mm},
    {"aten::_scaled_mm_v2.out", DispatchKey::CPU, Op::scaled_mm},
    {"aten::_weight_int8pack_mm", DispatchKey::CPU, Op::int8pack_mm},
    {"aten::_weight_int4pack_mm_for_cpu", DispatchKey::CPU, Op::int4pack_mm},
    {"aten::_dyn_quant_matmul_4bit", DispatchKey::CPU, Op::int4pack_mm},
    {"aten::mm", DispatchKey::SparseCPU, Op::sparse_mm},
    {"aten::mm.out", DispatchKey::SparseCPU, Op::sparse_mm},
    {"aten::_sparse_sparse_matmul", DispatchKey::SparseCPU, Op::sparse_mm},
    {"aten::hspmm", DispatchKey::SparseCPU, Op::sparse_mm},
    {"aten::hspmm.out", DispatchKey::SparseCPU, Op::sparse_mm},
    {"aten::addmm", DispatchKey::SparseCPU, Op::sparse_addmm},
    {"aten::addmm.out", DispatchKey::SparseCPU, Op::sparse_addmm},
    {"aten::addmm_", DispatchKey::SparseCPU, Op::sparse_addmm},
    {"aten::sspaddmm.out", DispatchKey::SparseCPU, Op::sparse_addmm},
    {"aten::bmm", DispatchKey::SparseCPU, Op::sparse_bmm},
    {"aten::bmm.out", DispatchKey::SparseCPU, Op::sparse_bmm},
    {"aten::mv", DispatchKey::SparseCPU, Op::sparse_mv},
    {"aten::mm", DispatchKey::SparseCsrCPU, Op::sparse_mm},
    {"aten::mm.out", DispatchKey::SparseCsrCPU, Op::sparse_mm},
    {"aten::_sparse_mm_reduce_impl", DispatchKey::SparseCsrCPU, Op::sparse_mm},
    {"aten::_sparse_mm_reduce_impl_backward", DispatchKey::SparseCsrCPU, Op::sparse_mm},
    {"aten::addmm", DispatchKey::SparseCsrCPU, Op::sparse_addmm},
    {"aten::addmm.out", DispatchKey::SparseCsrCPU, Op::sparse_addmm},
    {"aten::sparse_sampled_addmm", DispatchKey::SparseCsrCPU, Op::sparse_addmm},
    {"aten::sparse_sampled_addmm.out", DispatchKey::SparseCsrCPU, Op::sparse_addmm},
    {"aten::addmv.out", DispatchKey::SparseCsrCPU, Op::sparse_mv},
    {"quantized::linear", DispatchKey::QuantizedCPU, Op::quantized_linear},
    {"quantized::linear_relu", DispatchKey::QuantizedCPU, Op::quantized_linear},
    {"quantized::linear_leaky_relu", DispatchKey::QuantizedCPU, Op::quantized_linear},
    {"quantized::linear_tanh", DispatchKey::QuantizedCPU, Op::quantized_linear},
    {"quantized::matmul", DispatchKey::QuantizedCPU, Op::quantized_linear},
    {"quantized::linear_dynamic", DispatchKey::CPU, Op::quantized_linear},
    {"quantized::linear_relu_dynamic", DispatchKey::CPU, Op::quantized_linear},
    {"quantized::linear_dynamic_fp16", DispatchKey::CPU, Op::quantized_linear},
    {"quantized::linear_relu_dynamic_fp16", DispatchKey::CPU, Op::quantized_linear},
    {"mkldnn::_linear_pointwise", DispatchKey::CPU, Op::mkldnn_linear},
    {"mkldnn::_linear_pointwise.binary", DispatchKey::CPU, Op::mkldnn_linear},
    {"aten::mkldnn_linear", DispatchKey::MkldnnCPU, Op::mkldnn_linear},
    {"mkldnn::_convolution_pointwise", DispatchKey::CPU, Op::mkldnn_convolution},
    {"mkldnn::_convolution_pointwise.binary", DispatchKey::CPU, Op::mkldnn_convolution},
    {"mkldnn::_convolution_pointwise_.binary", DispatchKey::CPU, Op::mkldnn_convolution},
    {"mkldnn::_convolution_transpose_pointwise", DispatchKey::CPU, Op::mkldnn_convolution},
    {"quantized::conv1d", DispatchKey::QuantizedCPU, Op::quantized_convolution},
    {"quantized::conv1d_relu", DispatchKey::QuantizedCPU, Op::quantized_convolution},
    {"quantized::conv2d.new", DispatchKey::QuantizedCPU, Op::quantized_convolution},
    {"quantized::conv2d_relu.new", DispatchKey::QuantizedCPU, Op::quantized_convolution},
    {"quantized::conv3d.new", DispatchKey::QuantizedCPU, Op::quantized_convolution},
    {"quantized::conv3d_relu.new", DispatchKey::QuantizedCPU, Op::quantized_convolution},
};

// Calls torch's kernel and adds a line to the report. It is boxed, as arguments differ between
// torch versions.
class Listed : public c10::OperatorKernel {
 public:
  Listed(c10::SafeKernelFunction kernel, Op op) : kernel_(std::move(kernel)), op_(op) {}
  void operator()(
      const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    if (!intercepting()) return kernel_.callBoxed(op, keys, stack);
    note_uncovered(op_);
    const Bypass bypass;  // products inside the kernel are not listed separately
    kernel_.callBoxed(op, keys, stack);
  }

 private:
  c10::SafeKernelFunction kernel_;
  Op op_;
};

c10::OperatorName parsed(std::string_view name) {
  const auto dot = name.find('.');
  const auto overload = dot == name.npos ? std::string() : std::string(name.substr(dot + 1));
  return {std::string(name.substr(0, dot)), overload};
}

}  // namespace

void intercept_uncovered_ops() {
  for (const Product& product : kProducts) {
    const c10::OperatorName name = parsed(product.name);
    const auto handle = c10::Dispatcher::singleton().findSchema(name);
    if (!handle || !handle->hasKernelForDispatchKey(product.key)) continue;  // torch lacks it
    auto listed =
        std::make_unique<Listed>(handle->getComputedKernelForDispatchKey(product.key), product.op);
    auto function = torch::CppFunction::makeFromBoxedFunctor(std::move(listed));
    const std::string space(name.getNamespace().value_or("aten"));
    auto& library =
        *new torch::Library(torch::Library::IMPL, space, product.key, __FILE__, __LINE__);
    library.impl(product.name, std::move(function));
  }
}

}  // namespace holdfast
