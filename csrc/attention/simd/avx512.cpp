#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#define HOLDFAST_BYTES 64
#define HOLDFAST_PASSES attention_passes_avx512
#define HOLDFAST_NAME "avx512"
#include "attention/simd/passes_impl.h"
#endif
