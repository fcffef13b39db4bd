#include "device/kernel_launch.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <atomic>
#include <mutex>
#include <string_view>
#include <unordered_map>

namespace holdfast::device {

namespace {

Driver cuda_driver() {
  void* library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  TORCH_CHECK(library != nullptr, "holdfast: libcuda.so.1 is not there: ", dlerror());
  Driver found;
  found.launch = reinterpret_cast<decltype(found.launch)>(dlsym(library, "cuLaunchKernel"));
  found.is_capturing =
      reinterpret_cast<decltype(found.is_capturing)>(dlsym(library, "cuStreamIsCapturing"));
  TORCH_CHECK(
      found.launch != nullptr && found.is_capturing != nullptr,
      "holdfast: libcuda.so.1 lacks cuLaunchKernel or cuStreamIsCapturing");
  return found;
}

std::atomic<const Driver*> replaced{nullptr};

struct KeyHash {
  size_t operator()(const VariantKey& key) const {
    const std::string_view bytes(reinterpret_cast<const char*>(&key), sizeof key);
    return std::hash<std::string_view>{}(bytes);
  }
};

// Variants stay loaded, as captured graphs may hold them.
struct Variants {
  std::mutex mutex;
  std::unordered_map<VariantKey, LoadedVariant, KeyHash> known;
  std::function<LoadedVariant(const VariantKey&)> loader;
};

Variants& variants() {
  static auto& all = *new Variants;
  return all;
}

}  // namespace

const Driver& driver() {
  if (const Driver* other = replaced.load(std::memory_order_acquire)) return *other;
  static const Driver cuda = cuda_driver();
  return cuda;
}

void replace_driver(const Driver* other) { replaced.store(other, std::memory_order_release); }

void set_variant_loader(std::function<LoadedVariant(const VariantKey&)> loader) {
  const std::lock_guard<std::mutex> lock(variants().mutex);
  variants().loader = std::move(loader);
  variants().known.clear();
}

LoadedVariant variant_of(const VariantKey& key) {
  Variants& all = variants();
  std::function<LoadedVariant(const VariantKey&)> loader;
  {
    const std::lock_guard<std::mutex> lock(all.mutex);
    const auto found = all.known.find(key);
    if (found != all.known.end()) return found->second;
    loader = all.loader;
  }
  TORCH_CHECK(loader, "holdfast: nothing compiles the kernels: call prepare_kernels first");
  // Not under the lock: Python's own lock is taken meanwhile, and its holder may come here.
  const LoadedVariant loaded = loader(key);
  const std::lock_guard<std::mutex> lock(all.mutex);
  return all.known.emplace(key, loaded).first->second;
}

void launch(
    const LoadedVariant& variant, unsigned programs, unsigned batch, void* stream,
    Arguments& arguments) {
  const int failed = driver().launch(
      variant.function, programs, batch, 1, variant.threads, 1, 1, variant.shared_bytes, stream,
      arguments.pointers(), nullptr);
  TORCH_CHECK(failed == 0, "holdfast: cuLaunchKernel failed with error ", failed);
}

void* stream_of(const c10::Device& device) {
  if (device.is_cpu()) return nullptr;  // which stands in as the device in tests
  const c10::impl::VirtualGuardImpl guard(device.type());
  return guard.getStreamNativeHandle(guard.getStream(device));
}

bool captured(void* stream) {
  int status = 0;
  const int failed = driver().is_capturing(stream, &status);
  TORCH_CHECK(failed == 0, "holdfast: cuStreamIsCapturing failed with error ", failed);
  return status == 1;
}

}  // namespace holdfast::device
