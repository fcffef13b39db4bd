#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c,sse4.2")
// A product and the sum it goes into must stay two roundings.
#pragma GCC optimize("fp-contract=off")
#define HOLDFAST_BYTES 32
#define HOLDFAST_BAGS bag_kernels_avx2
#define HOLDFAST_NAME "avx2"
#include "embedding_bag/simd/kernels_impl.h"
#endif
