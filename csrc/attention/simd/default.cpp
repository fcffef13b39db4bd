#define HOLDFAST_BYTES 16
#define HOLDFAST_PASSES attention_passes_default
#define HOLDFAST_NAME "default"
#include <cstring>

#include "attention/simd/passes_impl.h"
#include "core/reduce.h"

namespace holdfast {

const AttentionPasses& attention_passes() {
#if defined(__x86_64__)
  static const AttentionPasses& chosen = [&]() -> const AttentionPasses& {
    const char* simd = reductions().name;
    if (std::strncmp(simd, "avx512", 6) == 0) return attention_passes_avx512;
    return std::strcmp(simd, "avx2") == 0 ? attention_passes_avx2 : attention_passes_default;
  }();
  return chosen;
#else
  return attention_passes_default;
#endif
}

}  // namespace holdfast
