#define HOLDFAST_UNROLL 2
#define HOLDFAST_REDUCTIONS reductions_default
#define HOLDFAST_NAME "default"
#include "reduce_impl.h"

namespace holdfast {

namespace {
const Reductions& choose() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return __builtin_cpu_supports("avx512bf16") ? reductions_avx512bf16 : reductions_avx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return reductions_avx2;
#endif
  return reductions_default;
}
}  // namespace

const Reductions& reductions() {
  static const Reductions& chosen = choose();
  return chosen;
}

}  // namespace holdfast
