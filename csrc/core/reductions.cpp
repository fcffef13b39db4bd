// The choice of the instruction set that all kernels but those of the digest run on.
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "core/instruction_sets.h"

namespace holdfast {

namespace {

// The widest that this processor runs, or a narrower one that HOLDFAST_SIMD names.
const Reductions& chosen_reductions() {
  static constexpr const Reductions* kAll[] = {
#if defined(__x86_64__)
      &reductions_avx512bf16,
#endif
      HOLDFAST_SETS(reductions)};
  const char* wanted = std::getenv("HOLDFAST_SIMD");
  const char* widest = nullptr;
  for (const Reductions* each : kAll) {
    if (!runs(each->name)) continue;
    if (wanted == nullptr || std::string_view(wanted) == each->name) return *each;
    if (widest == nullptr) widest = each->name;
  }
  throw std::runtime_error(
      std::string("HOLDFAST_SIMD=") + wanted + " does not run here; the widest that does is " +
      widest);
}

}  // namespace

const Reductions& reductions() {
  static const Reductions& chosen = chosen_reductions();
  return chosen;
}

}  // namespace holdfast
