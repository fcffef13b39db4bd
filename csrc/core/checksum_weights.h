// Checksum weights in the forms that the reductions read.
#pragma once

#include <vector>

#include "core/reduce.h"

namespace holdfast {

// The signs of checksums/weights.py, at least `count` of them; never freed.
Weights sign_weights(int64_t count);

// Any fp64 weights, for elements of one type in fast precision.
class FastWeights {
 public:
  FastWeights(const double* weights, int64_t count, Element element);
  Weights view() const;

 private:
  const double* wide_;
  std::vector<float> narrow_;
  std::vector<uint16_t> high_, low_;
};

}  // namespace holdfast
