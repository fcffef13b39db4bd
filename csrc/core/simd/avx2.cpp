#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
#define HOLDFAST_BYTES 32
#define HOLDFAST_REDUCTIONS reductions_avx2
#define HOLDFAST_NAME "avx2"
#include "core/simd/reduce_impl.h"
#endif
