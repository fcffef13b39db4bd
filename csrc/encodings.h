// Encodings that are kept: of watched weights until the weight changes, and of activations until
// the product of their gradient takes them.
#pragma once

#include <optional>
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

// Keeps the encoding of an activation that was multiplied by the weight at `partner`.
void keep_activation(const at::Tensor& a, const Encoding& encoding, const void* partner);

// Of the latest activation with that many rows that was multiplied by it; not taken yet.
std::optional<Encoding> activation_beside(const void* partner, int64_t rows);

void watch(const std::vector<at::Tensor>& weights);
void unwatch(const std::vector<at::Tensor>& weights);
void forget(const at::Tensor& weight);
int64_t cached_encodings();

}  // namespace holdfast
