/* The operations between the matrix products of a layer, in bf16 and float32.

   Each is the counterpart of the Triton kernel of the same name in peagle/kernels/triton, and
   rounds where the PyTorch reference of that kernel rounds. */

#include "attention.h"
#include "common.h"
#include "pool.h"
#include <math.h>

#define MIN_PARALLEL_SIZE 4096 /* fewer numbers are not worth a second thread */
/* Keys are transposed in words of 32 bits: two bf16, the first in the lower half, or one float32.
   Store transposed words as steps of the dot product: STEP numbers of a key each. `dot`
   adds the product of a step of a query with that step of LANES keys. */
static inline void store_steps_f32(float *p, vec words) { store_f32(p, words, LANES); }

static inline vec dot_f32(vec sum, float query, vec keys) {
    return multiply_add(splat(query), keys, sum);
}

#ifdef __AVX512BF16__
#define BF16_STEP 2

static inline void store_steps_bf16(float *p, vec words) { store_f32(p, words, LANES); }

static inline vec dot_bf16(vec sum, float query, vec keys) {
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_ps(query), (__m512bh)keys);
}

static inline void copy_steps_bf16(float *to, const bf16 *query, long d) {
    memcpy(to, query, d * sizeof *query);
}
#else
#define BF16_STEP 1

static inline void store_steps_bf16(float *p, vec words) {
    store_f32(p, (vec)((bits)words << 16), LANES);
    store_f32(p + KEY_BLOCK, (vec)((bits)words & 0xffff0000), LANES);
}

static inline vec dot_bf16(vec sum, float query, vec keys) { return dot_f32(sum, query, keys); }

static inline void copy_steps_bf16(float *to, const bf16 *query, long d) {
    for (long i = 0; i < d; i += LANES) store_f32(to + i, load_bf16(query + i, d - i), d - i);
}
#endif

static inline void copy_steps_f32(float *to, const float *query, long d) {
    memcpy(to, query, d * sizeof *query);
}

#define T       bf16
#define WORD    2 /* numbers in a word of 32 bits */
#define STEP    BF16_STEP
#define NAME(x) x##_bf16
#include "rows.inc"
#include "attention.inc"
#undef T
#undef WORD
#undef STEP
#undef NAME

#define T       float
#define WORD    1
#define STEP    1
#define NAME(x) x##_f32
#include "rows.inc"
#include "attention.inc"
