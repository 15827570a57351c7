/* The operations between the matrix products of a layer, in bf16 and float32.

   Each is the counterpart of the Triton kernel of the same name in peagle/kernels/triton, and
   rounds where the PyTorch reference of that kernel rounds. */

#include "common.h"
#include <math.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#define MIN_PARALLEL_SIZE 65536 /* fewer numbers are not worth a second thread */
#define MAX_HEAD_DIM      256
#define KEY_BLOCK         64 /* keys that are read at once */
#define MAX_QUERIES       64 /* rows x heads of a group, in one call of attend_rows */
#define UNSEEN_SCORE      -1e30f

/* Whether `#pragma omp` had an effect; without it, one thread computes. */
int has_openmp(void) {
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}

/* gcc has __builtin_shufflevector only since version 12, clang has no __builtin_shuffle. */
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ints){__VA_ARGS__})
#endif

/* Transpose 16 x 16 numbers of 32 bits, by interleaving the halves four times. */
static inline void transpose_tile(vec tile[LANES]) {
    for (int round = 0; round < 4; round++) {
        vec from[LANES];
        memcpy(from, tile, sizeof from);
        for (int i = 0; i < LANES / 2; i++) {
            vec a = from[i], b = from[i + LANES / 2];
            tile[2 * i] = SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            tile[2 * i + 1] =
                SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        }
    }
}

/* A word whose bits from .. to - 1 are set. */
static inline uint64_t bit_span(long from, long to) {
    uint64_t below = to >= 64 ? ~0ull : (1ull << to) - 1;
    return from >= 64 ? 0 : below & ~0ull << from;
}

static inline uint64_t shift_bits(uint64_t word, long by) {
    return by >= 64 || by <= -64 ? 0 : by < 0 ? word >> -by : word << by;
}

/* Keys are multiplied in words of 32 bits: two bf16, the first in the lower half, or one float32.
 */
static inline vec load_words_bf16(const bf16 *p, long n) {
    vec out = {0};
    if (n >= 2 * LANES) memcpy(&out, p, sizeof out);
    else if (n > 0) memcpy(&out, p, n * sizeof *p);
    return out;
}

static inline vec load_words_f32(const float *p, long n) { return load_f32(p, n); }

/* Add the product of the word at `query` with the word of each key. */
static inline vec dot_bf16(vec sum, const bf16 *query, vec keys) {
#ifdef __AVX512BF16__
    int32_t word;
    memcpy(&word, query, sizeof word);
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(word), (__m512bh)keys);
#else
    sum += load_bf16(query, 1)[0] * (vec)((bits)keys << 16);
    return sum + load_bf16(query + 1, 1)[0] * (vec)((bits)keys & 0xffff0000);
#endif
}

static inline vec dot_f32(vec sum, const float *query, vec keys) { return sum + *query * keys; }

#define T       bf16
#define WORD    2 /* numbers in a word of 32 bits */
#define NAME(x) x##_bf16
#include "rows.inc"
#include "attention.inc"
#undef T
#undef WORD
#undef NAME

#define T       float
#define WORD    1
#define NAME(x) x##_f32
#include "rows.inc"
#include "attention.inc"
