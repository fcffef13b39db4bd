// Interception of torch's own kernels on CPU: encoding, fault sites, verification.
#pragma once

namespace holdfast {

void install();  // registers the kernels with the dispatcher, once

// Products that pass through to torch, unverified: counted, so that the report names them. Called
// once, by install.
void intercept_uncovered_ops();

}  // namespace holdfast
