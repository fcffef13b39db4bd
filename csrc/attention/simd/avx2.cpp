#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
#define HOLDFAST_BYTES 32
#define HOLDFAST_PASSES attention_passes_avx2
#define HOLDFAST_NAME "avx2"
#include "attention/simd/passes_impl.h"
#endif
