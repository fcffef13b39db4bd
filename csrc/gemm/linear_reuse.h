// What the products of one linear layer read together.
//
// Its forward product reads X and its two backward products read X once more and dY twice:
// Y = X Wᵀ, dX = dY W, dW = dYᵀ X. So the forward check encodes X as well, and the check of dX sums
// the columns of dY as the check of dW will want them.
#pragma once

#include "core/sites.h"
#include "gemm/verify.h"

namespace holdfast {

// What to read, or what is known already, for this product.
Sharing sharing_for(const Problem& problem, const Encoding& encoding, Role role);

// Hands on what was read.
void share(const Problem& problem, const Sharing& sharing);

}  // namespace holdfast
