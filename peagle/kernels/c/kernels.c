/* The small operations between the matrices of a layer, in bf16 and float32: each is the C of the Triton kernel of the
   same name in this package, and rounds where the PyTorch reference beside that one rounds. */

#include "common.h"
#include <math.h>

#define SMALL 65536  /* numbers: less is not worth a second thread */
#define MAX_DIM 256  /* of a head */
#define BLOCK 64     /* keys */
#define QUERIES 64   /* rows x heads of a group */
#define UNSEEN -1e30f

/* One query [d] and 64 keys [d][64], of which it sees low .. high - 1: their weights, not normalised yet.
   Returns how far everything summed before must shrink. */
static float weigh(const float *query, const float *turned, float *weights, long low, long high, long d, float scale,
                   float *best, float *total) {
    const ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    vec score[BLOCK / LANES] = {{0}}, top = all(*best), sum = {0};
    for (long i = 0; i < d; i++)
        for (int w = 0; w < BLOCK / LANES; w++) score[w] += query[i] * load_f32(turned + i * BLOCK + w * LANES, LANES);
    for (int w = 0; w < BLOCK / LANES; w++) {
        ints at = lane + w * LANES, seen = (at >= (int)low) & (at < (int)high);
        score[w] = pick(seen, score[w] * scale, all(UNSEEN));
        top = pick(score[w] > top, score[w], top);
    }
    float larger = top[0];
    for (int l = 1; l < LANES; l++) larger = top[l] > larger ? top[l] : larger;
    for (int w = 0; w < BLOCK / LANES; w++) {
        ints at = lane + w * LANES, seen = (at >= (int)low) & (at < (int)high);
        vec weight = pick(seen, exp_of(score[w] - larger), all(0));
        store_f32(weights + w * LANES, weight, LANES);
        sum += weight;
    }
    float shrink = exp_of(all(*best - larger))[0];
    *total = *total * shrink + sum_of(sum);
    *best = larger;
    return shrink;
}

/* 16 x 16 numbers of 32 bits, rows become columns: four rounds of interleaving the halves. */
static inline void turn_tile(vec tile[LANES]) {
    for (int round = 0; round < 4; round++) {
        vec from[LANES];
        memcpy(from, tile, sizeof from);
        for (int i = 0; i < LANES / 2; i++) {
            vec a = from[i], b = from[i + LANES / 2];
            tile[2 * i] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            tile[2 * i + 1] = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        }
    }
}

/* Two bf16 travel as one number through turn_tile, and part behind it: the first lies in the lower half. */
static inline vec load_pairs_bf16(const bf16 *p, long n) {
    vec out = {0};
    if (n >= 2 * LANES) memcpy(&out, p, sizeof out);
    else if (n > 0) memcpy(&out, p, n * sizeof *p);
    return out;
}

static inline void store_pair_bf16(float *to, vec pair) {
    store_f32(to, (vec)((bits)pair << 16), LANES);
    store_f32(to + BLOCK, (vec)((bits)pair & 0xffff0000), LANES);
}

static inline vec load_pairs_f32(const float *p, long n) { return load_f32(p, n); }

static inline void store_pair_f32(float *to, vec x) { store_f32(to, x, LANES); }

#define T bf16
#define PAIR 2 /* numbers in 32 bits */
#define NAME(x) x##_bf16
#include "rows.inc"
#include "attention.inc"
#undef T
#undef PAIR
#undef NAME

#define T float
#define PAIR 1
#define NAME(x) x##_f32
#include "rows.inc"
#include "attention.inc"
