/* What the kernels were compiled for, as peagle/kernels/cpu/library.py reports it. */

#include "common.h"

int vector_bits(void) { return LANES * 32; }

const char *instruction_set(void) {
#if defined(__AVX512F__)
    return "avx512";
#elif defined(__AVX2__)
    return "avx2";
#elif defined(__x86_64__)
    return "sse2";
#elif defined(__aarch64__)
    return "neon";
#else
    return "generic";
#endif
}

/* What the kernels use: the dot products, the best first, and conversions of 16 bits. */
const char *cpu_features(void) {
    return ""
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
           " bf16"
#endif
#if defined(__ARM_FEATURE_DOTPROD)
           " dotprod"
#endif
#if defined(__AVX512VNNI__)
           " vnni"
#endif
#if defined(__F16C__) || defined(__aarch64__)
           " f16c"
#endif
        ;
}
