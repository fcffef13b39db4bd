// Checksum weights, in the number formats that the reductions read.
#pragma once

#include <memory>

#include "core/reduce.h"

namespace holdfast {

// Returns at least `count` of the signs that checksums/weights.py defines. They are never freed.
Weights sign_weights(int64_t count);

// Any fp64 weights, converted for elements of one type in fast precision.
class FastWeights {
 public:
  FastWeights(const double* weights, int64_t count, Element element);
  const Weights& view() const { return weights_; }

 private:
  std::unique_ptr<float[]> memory_;
  Weights weights_;
};

}  // namespace holdfast
