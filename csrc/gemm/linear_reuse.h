// Shares row statistics and checksums between the products of one linear layer.
//
// Its forward product reads X and its two backward products read X once more and dY twice:
// Y = X Wᵀ, dX = dY W, dW = dYᵀ X. So the forward check encodes X as well, and the check of dX sums
// the columns of dY as the check of dW will want them. Torch computes dW first if there is no bias;
// on a device its check then sums the rows of dY as that of dX will want them.
#pragma once

#include "core/sites.h"
#include "gemm/encoding_cache.h"
#include "gemm/verify.h"

namespace holdfast {

// Returns which statistics this product must read and which are already known. `sums_columns` says
// whether its check can compute the column sums of A.
Sharing sharing_for(
    const Problem& problem, const KnownEncoding& known, Role role, bool sums_columns);

// Stores the statistics that this product read, for the layer's later products. `with_weight` keeps
// those of its weight beside those of X, if dX will be computed.
void share(const Problem& problem, const Sharing& sharing, bool with_weight);

}  // namespace holdfast
