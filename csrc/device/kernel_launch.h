// Variants of the verification kernel, and their launch through the CUDA driver.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>

#include "device/kernel_plan.h"

namespace holdfast::device {

// The functions of the CUDA driver that a launch needs, found at run time.
struct Driver {
  // cuLaunchKernel: grid, block, shared bytes, stream, parameters, extra; 0 if it succeeded.
  int (*launch)(
      void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned shared,
      void* stream, void** parameters, void** extra) = nullptr;
  // cuStreamIsCapturing, whose status is 1 while the stream is captured.
  int (*is_capturing)(void* stream, int* status) = nullptr;
};

const Driver& driver();
// Replaces the driver; tests record launches so. Null restores it.
void replace_driver(const Driver* other);

// What a variant is compiled for (`Request` in abft/gemm/ahead_of_time.py).
struct VariantKey {
  int8_t device = 0;
  c10::ScalarType c{}, d{}, a{}, sums{};
  Layout c_layout{}, d_layout{}, a_layout{};
  bool c_aligned = false, d_aligned = false, a_aligned = false;
  bool addend = false, predict = false, encode = false, across = false, turned = false;
  bool scaled = false;
  Groups groups{};
  std::array<uint16_t, 4> tiles{};  // rows and columns of C's and of A's

  bool operator==(const VariantKey& o) const { return std::memcmp(this, &o, sizeof o) == 0; }
};
static_assert(
    std::has_unique_object_representations_v<VariantKey>, "keys are compared and hashed as bytes");

struct LoadedVariant {
  void* function = nullptr;
  unsigned shared_bytes = 0, threads = 0;
};

// Sets the function that compiles and loads a variant that is launched for the first time.
void set_variant_loader(std::function<LoadedVariant(const VariantKey&)> loader);
LoadedVariant variant_of(const VariantKey& key);

// The arguments of one launch, in the order of the kernel's parameters.
class Arguments {
 public:
  template <typename T>
  void add(T value) {
    static_assert(sizeof(T) <= sizeof(uint64_t) && std::is_trivially_copyable_v<T>);
    std::memcpy(&values_.at(count_), &value, sizeof value);
    pointers_[count_] = &values_[count_];
    ++count_;
  }
  template <typename... T>
  void add_all(T... values) {
    (add(values), ...);
  }
  void** pointers() { return pointers_.data(); }

 private:
  std::array<uint64_t, 64> values_{};
  std::array<void*, 64> pointers_{};
  size_t count_ = 0;
};

// Launches on a stream of the current device. Throws if the driver refuses.
void launch(
    const LoadedVariant& variant, unsigned programs, unsigned batch, void* stream,
    Arguments& arguments);

// The current stream of a device, as the driver knows it.
void* stream_of(const c10::Device& device);
bool captured(void* stream);

}  // namespace holdfast::device
