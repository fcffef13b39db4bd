// Products verified by the Triton kernel of abft/gemm/kernels_verify.py, launched from here.
#pragma once

#include "device/backend.h"

namespace holdfast::device {

// Its launches wait for nothing and can be captured in CUDA graphs; a device must be prepared
// before the first capture, and a variant of the kernel is compiled when it is first needed.
Backend& kernel_backend();

// Puts the signs and the counters of the kernel on a device, which no capture could.
void prepare_kernels(const c10::Device& device);

}  // namespace holdfast::device
