#if defined(__x86_64__)
#pragma GCC target( \
    "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c,prefer-vector-width=512")
#define HOLDFAST_BF16_DOT
#define HOLDFAST_BYTES 64
#define HOLDFAST_REDUCTIONS reductions_avx512bf16
#define HOLDFAST_NAME "avx512bf16"
#include "core/simd/reduce_impl.h"
#endif
