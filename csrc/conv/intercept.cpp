#include "conv/intercept.h"

#include <ATen/ops/convolution_backward_native.h>
#include <ATen/ops/convolution_native.h>

#include <array>
#include <tuple>

#include "core/laps.h"

namespace holdfast {

namespace {

using at::IntArrayRef;
using at::Tensor;

Tensor convolution(
    const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
    IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, bool transposed,
    IntArrayRef output_padding, int64_t groups) {
  const auto run = [&] {
    const Bypass bypass;  // its products are not verified separately
    return at::native::convolution(
        input, weight, bias, stride, padding, dilation, transposed, output_padding, groups);
  };
  if (!intercepting()) return run();
  const SiteKey key = current_site(Op::convolution);
  Laps laps;
  Tensor output = run();
  on_convolution(
      {key,
       input,
       weight,
       bias,
       stride,
       padding,
       dilation,
       transposed,
       output_padding,
       groups,
       Tensor(),
       {output},
       laps.lap()});
  return output;
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& gradient, const Tensor& input, const Tensor& weight,
    at::OptionalIntArrayRef bias_sizes, IntArrayRef stride, IntArrayRef padding,
    IntArrayRef dilation, bool transposed, IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> mask) {
  const auto run = [&] {
    const Bypass bypass;
    return at::native::convolution_backward(
        gradient, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding,
        groups, mask);
  };
  if (!intercepting()) return run();
  const SiteKey key = current_site(Op::convolution);
  Laps laps;
  auto results = run();
  const auto& [of_input, of_weight, of_bias] = results;
  on_convolution(
      {key,
       input,
       weight,
       std::nullopt,
       stride,
       padding,
       dilation,
       transposed,
       output_padding,
       groups,
       gradient,
       {of_input, of_weight, of_bias},
       laps.lap()});
  return results;
}

}  // namespace

void intercept_convolutions(torch::Library& library) {
  library.impl("convolution", TORCH_FN(convolution));
  library.impl("convolution_backward", TORCH_FN(convolution_backward));
}

}  // namespace holdfast
