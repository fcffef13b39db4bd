// The instruction sets that kernels are compiled for. setup.py names them.
#pragma once

#include <initializer_list>
#include <string_view>

#include "core/reduce.h"

// An operator's kernels for each instruction set that every operator has, the widest first.
#if defined(__x86_64__)
#define HOLDFAST_SETS(kernels) &kernels##_avx512, &kernels##_avx2, &kernels##_default
#else
#define HOLDFAST_SETS(kernels) &kernels##_default
#endif

namespace holdfast {

// Returns whether this processor has everything that kernels of the named set may use.
inline bool runs(std::string_view set) {
#if defined(__x86_64__)
  if (set == "avx2") return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (set == "avx512") return wide;
  if (set == "avx512bf16") return wide && __builtin_cpu_supports("avx512bf16");
  if (set == "avx512vnni") return wide && __builtin_cpu_supports("avx512vnni");
#endif
  return set == "default";
}

// Returns the kernels of an operator for the instruction set that the reductions run on.
template <typename Kernels>
const Kernels& beside_reductions(std::initializer_list<const Kernels*> widest_first) {
  const std::string_view running = reductions().name;
  for (const Kernels* each : widest_first) {
    if (running.substr(0, std::string_view(each->name).size()) == each->name) return *each;
  }
  return **(widest_first.end() - 1);
}

}  // namespace holdfast
