#define HOLDFAST_BYTES 16
#define HOLDFAST_REDUCTIONS reductions_default
#define HOLDFAST_NAME "default"
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "core/simd/reduce_impl.h"

namespace holdfast {

namespace {

const Reductions* const kNarrowestLast[] = {
#if defined(__x86_64__)
    &reductions_avx512bf16, &reductions_avx512, &reductions_avx2,
#endif
    &reductions_default};

const Reductions& widest() {
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

// The widest, or a narrower one that HOLDFAST_SIMD names.
const Reductions& choose() {
  const char* wanted = std::getenv("HOLDFAST_SIMD");
  const Reductions* chosen = &widest();
  if (wanted == nullptr) return *chosen;
  bool runs = false;
  for (const Reductions* each : kNarrowestLast) {
    runs = runs || each == &widest();
    if (runs && std::strcmp(each->name, wanted) == 0) return *each;
  }
  throw std::runtime_error(
      std::string("HOLDFAST_SIMD=") + wanted + " does not run here; the widest that does is " +
      chosen->name);
}

}  // namespace

const Reductions& reductions() {
  static const Reductions& chosen = choose();
  return chosen;
}

}  // namespace holdfast
