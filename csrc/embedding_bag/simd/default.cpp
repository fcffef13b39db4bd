// A product and the sum it goes into must stay two roundings.
#pragma GCC optimize("fp-contract=off")
#define HOLDFAST_BYTES 16
#define HOLDFAST_BAGS bag_kernels_default
#define HOLDFAST_NAME "default"
#include <cstring>

#include "core/reduce.h"
#include "embedding_bag/simd/kernels_impl.h"

namespace holdfast {

// The instruction set that the reductions run on.
const BagKernels& bag_kernels() {
#if defined(__x86_64__)
  static const BagKernels& chosen = [&]() -> const BagKernels& {
    const char* name = reductions().name;
    if (std::strncmp(name, "avx512", 6) == 0) return bag_kernels_avx512;
    return std::strcmp(name, "avx2") == 0 ? bag_kernels_avx2 : bag_kernels_default;
  }();
  return chosen;
#else
  return bag_kernels_default;
#endif
}

}  // namespace holdfast
