// Encodings of watched weights, kept until the weight changes.
#pragma once

#include <vector>

#include "verify.h"

namespace holdfast {

// B's encoding. A kept one belongs to this very storage at this very version and still has its
// fingerprint; everything else is encoded anew.
struct KnownEncoding {
  Encoding encoding;
  bool kept;     // made before this op
  bool damaged;  // one was kept, and had changed by itself
};
KnownEncoding encoding_of(const at::Tensor& b);

void watch(const std::vector<at::Tensor>& weights);
void unwatch(const std::vector<at::Tensor>& weights);
void forget(const at::Tensor& weight);
int64_t cached_encodings();

}  // namespace holdfast
