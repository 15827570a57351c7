/* A mixture of experts: each row goes through the experts that are chosen for it.

   Rows are grouped by expert, so that the matrices of an expert are read once for all of its rows.
   The outputs of a row's experts are added in the order of their ranks: the bits of a row do not
   depend on its neighbors. */

#include "experts.h"
#include "pool.h"
#include <math.h>
#include <stdlib.h>

#define MIN_PARALLEL 4096 /* fewer numbers are not worth a second thread */

static int useful_threads(long numbers, int threads) {
    return numbers > MIN_PARALLEL ? threads : 1;
}

/* Where the pairs of a row and a chosen expert lie among the pairs, ordered by expert. */
struct pair_order {
    long *places; /* [rows * top_k]; -1 if there is no such expert */
    long *starts; /* [count + 1]: the first pair of each expert */
};

/* chosen [pairs]: experts. Pairs of one expert keep their order. */
static void order_pairs(const int64_t *chosen, long pairs, long count, struct pair_order *order) {
    long *starts = order->starts;
    memset(starts, 0, (count + 1) * sizeof *starts);
    for (long i = 0; i < pairs; i++)
        if (chosen[i] >= 0 && chosen[i] < count) starts[chosen[i] + 1]++;
    for (long e = 0; e < count; e++) starts[e + 1] += starts[e];
    for (long i = 0; i < pairs; i++)
        order->places[i] = chosen[i] >= 0 && chosen[i] < count ? starts[chosen[i]]++ : -1;
    for (long e = count; e > 0; e--) starts[e] = starts[e - 1]; /* each was moved to its end */
    starts[0] = 0;
}

/* The experts with the largest scores [count], the first of equal ones -> chosen and their scores,
   best [top_k], in order. */
static void choose_experts(const float *scores, long count, long top_k, int64_t *chosen,
                           float *best) {
    for (long i = 0; i < count; i++) {
        long rank = min_long(i, top_k);
        if (rank == top_k && !(scores[i] > best[--rank])) continue; /* the last one stays */
        for (; rank > 0 && scores[i] > best[rank - 1]; rank--)
            best[rank] = best[rank - 1], chosen[rank] = chosen[rank - 1];
        best[rank] = scores[i], chosen[rank] = i;
    }
}

/* chosen [pairs], all of which exist -> counts [count + 1], as in `struct moe`. */
static void count_rows(const int64_t *chosen, long pairs, long count, int32_t *counts) {
    memset(counts, 0, (count + 1) * sizeof *counts);
    for (long i = 0; i < pairs; i++)
        if (!counts[chosen[i]]++) counts[count]++;
}

/* The sum of e^(score - top) over n scores. */
static float sum_exponentials(const float *scores, long n, float top) {
    vec sum = {0};
    for (long i = 0; i < n; i += LANES) {
        vec part = exp_lanes(load_f32(scores + i, n - i) - top);
        float lanes[LANES] = {0};
        store_f32(lanes, part, n - i); /* those behind the end are no scores */
        sum += load_f32(lanes, LANES);
    }
    return sum_lanes(sum);
}

#define T       bf16
#define NAME(x) x##_bf16
#include "experts.inc"
#undef T
#undef NAME

#define T       float
#define NAME(x) x##_f32
#include "experts.inc"
