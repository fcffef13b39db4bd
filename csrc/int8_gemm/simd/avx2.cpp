#if defined(__x86_64__)
#pragma GCC target("avx2,fma")
#define HOLDFAST_BYTES 32
#define HOLDFAST_PASSES int8_passes_avx2
#define HOLDFAST_NAME "avx2"
#include "int8_gemm/simd/passes_impl.h"
#endif
