// Encodings that are kept: of watched weights until the weight changes, and of activations until
// the product of their gradient takes them.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/product.h"
#include "core/sites.h"

namespace holdfast {

// B's encoding. A kept one belongs to this very storage at this very version and still has its
// fingerprint; everything else is encoded anew.
struct KnownEncoding {
  Encoding encoding;
  bool kept;  // made before this op
  bool damaged;  // one was kept, and had changed by itself
};
KnownEncoding encoding_of(const at::Tensor& b, Role role);

// Keeps the encoding of an activation for the gradients of the product that read it.
void keep_activation(const at::Tensor& a, const Encoding& encoding);

// Of the activation that the product read whose gradient is computed now; not taken yet.
std::optional<Encoding> activation_beside();

// Returns what unwatch needs: a weight may have other memory by then.
std::vector<uintptr_t> watch(const std::vector<at::Tensor>& weights);
void unwatch(const std::vector<uintptr_t>& keys);
void forget(const at::Tensor& weight);
int64_t cached_encodings();

}  // namespace holdfast
