#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,prefer-vector-width=512")
#define HOLDFAST_VNNI
#define HOLDFAST_BYTES 64
#define HOLDFAST_PASSES int8_passes_avx512vnni
#define HOLDFAST_NAME "avx512vnni"
#include "int8_gemm/simd/passes_impl.h"
#endif
