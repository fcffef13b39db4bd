#define HOLDFAST_UNROLL 2
#define HOLDFAST_REDUCE reduce_default
#include "reduce_impl.h"

namespace holdfast {

namespace {
struct Choice {
  ReduceFn function;
  const char* name;
};

Choice choose() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    if (__builtin_cpu_supports("avx512bf16")) return {reduce_avx512bf16, "avx512bf16"};
    return {reduce_avx512, "avx512"};
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return {reduce_avx2, "avx2"};
  }
#endif
  return {reduce_default, "default"};
}

const Choice& chosen() {
  static const Choice choice = choose();
  return choice;
}
}  // namespace

ReduceFn reduce_rows() { return chosen().function; }
const char* simd_name() { return chosen().name; }

}  // namespace holdfast
