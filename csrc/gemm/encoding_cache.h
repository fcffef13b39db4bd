// Encodings that are kept: of watched weights until the weight changes, and of activations until
// the product of their gradient takes them.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "core/product.h"
#include "core/sites.h"

namespace holdfast {

struct KnownEncoding {
  Encoding encoding;
  bool kept;  // It was made by an earlier operation.
  bool damaged;  // One was kept, and had changed in memory.
  // Of B = X, where dW is computed before dX: that of W, of which the check of dX will need it.
  std::optional<Encoding> of_weight = {};
};

// An encoding, and on a device a second copy of it for `drop_damaged`.
struct EncodedTwice {
  Encoding encoding, copy = {};
};

// Encodes right operands: `one` a matrix or batch, `both` a matrix and its transpose.
struct OperandEncoder {
  std::function<EncodedTwice(const at::Tensor&)> one;
  std::function<std::pair<EncodedTwice, EncodedTwice>(const at::Tensor&)> both;
  // Returns whether a kept encoding may be used, which is not asked if this is null.
  bool (*intact)(const Encoding&) = nullptr;
};

// Returns the encoding of B: a kept one, for the same storage at the same version and if it is
// intact, or one made anew. A watched weight that was used in both directions before it changed, as
// it is in training, is encoded in both at once. While a device's graph is `captured` none of a
// weight is used or kept, as the weight changes between replays.
KnownEncoding encoding_of(
    const at::Tensor& b, Role role, const OperandEncoder& encoder, bool captured = false);
KnownEncoding encoding_of(const at::Tensor& b, Role role);  // on CPU, by `encode`

// Keeps the encoding of an activation for the gradients of the product that read it, and with it
// one of the product's weight.
void keep_activation(
    const at::Tensor& a, const Encoding& encoding, std::optional<Encoding> of_weight = {});

// Returns the encoding of Bᵀ, if B is a watched weight and it is kept.
std::optional<Encoding> kept_of_transpose(const at::Tensor& b);

// Returns the kept encoding of the activation of the product whose gradient is computed now. It
// stays kept.
std::optional<Encoding> activation_beside();

// Returns the keys that unwatch takes, as a weight may have other memory by then.
std::vector<uintptr_t> watch(const std::vector<at::Tensor>& weights);
void unwatch(const std::vector<uintptr_t>& keys);
void forget(const at::Tensor& weight);
void forget_all();  // also those of activations

// Drops the encodings of weights that differ from their second copies, and returns their number. It
// waits for the device.
int64_t drop_damaged();
int64_t cached_encodings();

}  // namespace holdfast
