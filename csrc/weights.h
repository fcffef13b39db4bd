// Encodings of watched weights, kept until the weight changes.
#pragma once

#include <utility>
#include <vector>

#include "verify.h"

namespace holdfast {

// B's encoding, and whether it came from the cache. A cached one belongs to this very storage at
// this very version; everything else is encoded anew.
std::pair<Encoding, bool> encoding_of(const at::Tensor& b);

void watch(const std::vector<at::Tensor>& weights);
void unwatch(const std::vector<at::Tensor>& weights);
void forget(const at::Tensor& weight);
int64_t cached_encodings();

}  // namespace holdfast
