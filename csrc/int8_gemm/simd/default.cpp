#define HOLDFAST_BYTES 16
#define HOLDFAST_PASSES int8_passes_default
#define HOLDFAST_NAME "default"
#include <cstring>

#include "core/reduce.h"
#include "int8_gemm/simd/passes_impl.h"

namespace holdfast {

namespace {

const Int8Passes& chosen() {
#if defined(__x86_64__)
  const char* simd = reductions().name;
  if (std::strncmp(simd, "avx512", 6) == 0) {
    return __builtin_cpu_supports("avx512vnni") ? int8_passes_avx512vnni : int8_passes_avx512;
  }
  if (std::strcmp(simd, "avx2") == 0) return int8_passes_avx2;
#endif
  return int8_passes_default;
}

}  // namespace

const Int8Passes& int8_passes() {
  static const Int8Passes& passes = chosen();
  return passes;
}

}  // namespace holdfast
