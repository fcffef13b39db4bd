// The interception of torch's convolutions on CPU, whose checks are in Python (holdfast/abft/conv).
#pragma once

#include <torch/library.h>

#include <vector>

#include "core/callbacks.h"

namespace holdfast {

// A convolution that was computed, or its gradients.
struct Convolved {
  SiteKey key;  // Its role is that of the forward pass also for gradients.
  at::Tensor input, weight;
  std::optional<at::Tensor> bias;
  at::IntArrayRef stride, padding, dilation;
  bool transposed;
  at::IntArrayRef output_padding;
  int64_t groups;
  at::Tensor gradient;  // That of the output; undefined in the forward pass.
  std::vector<at::Tensor> results;  // Those that nobody asked for are undefined.
  double seconds;
};

inline auto& on_convolution = *new Callback<const Convolved&>;

void intercept_convolutions(torch::Library& library);

}  // namespace holdfast
