#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c,sse4.2")
// A product and the sum it goes into must stay two roundings.
#pragma GCC optimize("fp-contract=off")
// GCC's own header reads what it left undefined on purpose (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#define HOLDFAST_BYTES 64
#define HOLDFAST_BAGS bag_kernels_avx512
#define HOLDFAST_NAME "avx512"
#include "embedding_bag/simd/kernels_impl.h"
#endif
