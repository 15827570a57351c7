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

#define T bf16
#define NAME(x) x##_bf16
#include "rows.inc"
#include "attention.inc"
#undef T
#undef NAME

#define T float
#define NAME(x) x##_f32
#include "rows.inc"
#include "attention.inc"
