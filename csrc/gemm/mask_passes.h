// The passes over addends that mask elements (gemm/masked.h), compiled once for each instruction
// set.
#pragma once

#include <cstdint>

#include "core/reduce.h"

namespace holdfast {

// Magnitudes are the bits of an element without its sign, as integers, which are in the same order.
struct Magnitudes {
  int64_t most = 0, least = INT64_MAX;  // INF counts as 0 here, and NaN is above all numbers.
  bool infinite = false;  // An element is INF.
};

// How a product with a mask must follow from the one without it.
struct Masking {
  Element element;
  int64_t least;  // The magnitude from which elements of the addend mask.
  double beta, eps;
  double steps;  // A finite mask may be added with an error of so many eps.
};

struct MaskPasses {
  // Extends what is known of the magnitudes of other elements by those of `count` more.
  void (*magnitudes)(Element, const void* addend, int64_t count, Magnitudes&);
  // Writes the addend with 0 in place of what masks.
  void (*unmask)(Element, const void* addend, int64_t count, int64_t least, void* to);
  // Compares elements of C with those of the product without the mask. INF must be that of the
  // addend, or its negative, and a finite mask must be added up to rounding.
  bool (*contradicts)(
      const Masking&, const void* c, const void* unmasked, const void* addend, int64_t count);
  const char* name;
};

extern const MaskPasses mask_passes_default, mask_passes_avx2, mask_passes_avx512;

}  // namespace holdfast
