/* The parts of attention that do not depend on the dtype: tiles in registers, masks, softmax. */
#pragma once
#include "common.h"

#define MAX_HEAD_DIM      256
#define KEY_BLOCK         64 /* keys that are read at once */
#define MAX_QUERIES       64 /* rows x heads of a group, in one call of attend_rows */
#define UNSEEN_SCORE      -1e30f

/* Queries that share the keys and values in registers, and the vectors of each. */
#define TILE_QUERIES 4
#define VECTORS      4
#if defined(__AVX512F__) || defined(__aarch64__)
#define FULL_TILE_VECTORS 4 /* of 32 registers */
#else
#define FULL_TILE_VECTORS 2 /* of 16 registers */
#endif

/* gcc has __builtin_shufflevector only since version 12, clang has no __builtin_shuffle. */
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ints){__VA_ARGS__})
#endif

/* The lower and the upper halves of two vectors, interleaved, and the number of each lane. On AVX2
   the halves of every 16 bytes, because its instructions do not cross them. */
#if LANES == 16
#define LOWER(a, b)  SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define UPPER(a, b)  SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#define LANE_NUMBERS {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#elif LANES == 8
#define LOWER(a, b)  SHUFFLE(a, b, 0, 8, 1, 9, 4, 12, 5, 13)
#define UPPER(a, b)  SHUFFLE(a, b, 2, 10, 3, 11, 6, 14, 7, 15)
#define LANE_NUMBERS {0, 1, 2, 3, 4, 5, 6, 7}
#else
#define LOWER(a, b)  SHUFFLE(a, b, 0, 4, 1, 5)
#define UPPER(a, b)  SHUFFLE(a, b, 2, 6, 3, 7)
#define LANE_NUMBERS {0, 1, 2, 3}
#endif

/* Transpose `size` x `size` numbers of 32 bits, by interleaving the halves log2(size) times. The
   loops are unrolled, so that the tile stays in registers. */
INLINE void interleave(vec *tile, const int size) {
#pragma GCC unroll 4
    for (int width = 1; width < size; width *= 2) {
        vec from[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < size; i++) from[i] = tile[i];
#pragma GCC unroll 8
        for (int i = 0; i < size / 2; i++) {
            tile[2 * i] = LOWER(from[i], from[i + size / 2]);
            tile[2 * i + 1] = UPPER(from[i], from[i + size / 2]);
        }
    }
}

INLINE void transpose_tile(vec tile[LANES]) {
#if LANES == 8
    interleave(tile, 4); /* the lower and upper 4 x 4 numbers of both halves */
    interleave(tile + 4, 4);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        vec left = tile[i], right = tile[i + 4];
        tile[i] = SHUFFLE(left, right, 0, 1, 2, 3, 8, 9, 10, 11);
        tile[i + 4] = SHUFFLE(left, right, 4, 5, 6, 7, 12, 13, 14, 15);
    }
#else
    interleave(tile, LANES);
#endif
}

/* A word whose bits from .. to - 1 are set. */
static inline uint64_t bit_span(long from, long to) {
    uint64_t below = to >= 64 ? ~0ull : (1ull << to) - 1;
    return from >= 64 ? 0 : below & ~0ull << from;
}

/* The lanes of a vector whose bit in `set` is set. */
static inline ints lane_mask(uint64_t set) {
    const ints number = LANE_NUMBERS;
    return ((int)(set & ((1u << LANES) - 1)) & (1 << number)) != 0;
}

static inline float max_lane(vec x) {
    float top = x[0];
    for (int l = 1; l < LANES; l++) top = x[l] > top ? x[l] : top;
    return top;
}

/* Turn scores [64] of one query into unnormalized softmax weights; `visible` has a bit for each key
   that it attends to, `is_full` is a constant: whether it attends to all. Returns the factor for
   everything that was summed before. */
INLINE float block_weights(const int is_full, float *scores, uint64_t visible, float scale,
                           float *max_score, float *total) {
    vec top = splat(*max_score), sum = {0};
#pragma GCC unroll 4
    for (int j = 0; j < KEY_BLOCK; j += LANES) {
        vec score = load_f32(scores + j, LANES) * scale;
        if (!is_full) score = blend(lane_mask(visible >> j), score, splat(UNSEEN_SCORE));
        top = blend(score > top, score, top);
        store_f32(scores + j, score, LANES);
    }
    float new_max = max_lane(top);
#pragma GCC unroll 4
    for (int j = 0; j < KEY_BLOCK; j += LANES) {
        vec weight = exp_lanes(load_f32(scores + j, LANES) - new_max);
        if (!is_full) weight = blend(lane_mask(visible >> j), weight, splat(0));
        store_f32(scores + j, weight, LANES);
        sum += weight;
    }
    float rescale = exp_lanes(splat(*max_score - new_max))[0];
    *total = *total * rescale + sum_lanes(sum);
    *max_score = new_max;
    return rescale;
}

static float softmax_weights(float *scores, uint64_t visible, float scale, float *max_score,
                             float *total) {
    return visible == ~0ull ? block_weights(1, scores, visible, scale, max_score, total)
                            : block_weights(0, scores, visible, scale, max_score, total);
}

/* Add the weighted values to sums [queries][MAX_HEAD_DIM], each multiplied by its `rescale` before.
   A value is used only for the queries that attend to it. */
INLINE void tile_values(const int queries, const int vectors, const float *const *values,
                        const uint64_t *visible, float weights[][KEY_BLOCK], const float *rescale,
                        long padded_dim, float *sums) {
    uint64_t all = ~0ull, any = 0;
    for (int q = 0; q < queries; q++) all &= visible[q], any |= visible[q];
    for (long i = 0; i < padded_dim; i += vectors * LANES) {
        vec sum[TILE_QUERIES][VECTORS];
        for (int q = 0; q < queries; q++)
            for (int v = 0; v < vectors; v++)
                sum[q][v] = load_f32(sums + q * MAX_HEAD_DIM + i + v * LANES, LANES) * rescale[q];
        for (uint64_t left = any; left; left &= left - 1) {
            long j = __builtin_ctzll(left);
            vec value[VECTORS];
            for (int v = 0; v < vectors; v++)
                value[v] = load_f32(values[j] + i + v * LANES, LANES);
            for (int q = 0; q < queries; q++)
                if ((all >> j & 1) || (visible[q] >> j & 1))
                    for (int v = 0; v < vectors; v++)
                        sum[q][v] = multiply_add(splat(weights[q][j]), value[v], sum[q][v]);
        }
        for (int q = 0; q < queries; q++)
            for (int v = 0; v < vectors; v++)
                store_f32(sums + q * MAX_HEAD_DIM + i + v * LANES, sum[q][v], LANES);
    }
}

/* The softmax of the queries so far: the sums of values are multiplied by e^max_score. */
struct softmax_state {
    float sums[MAX_QUERIES * MAX_HEAD_DIM], max_score[MAX_QUERIES], total[MAX_QUERIES];
};

/* Without any key: a sink is a score without a value. Query q is of head q % group; sinks [group] or
   null. */
static void start_softmax(struct softmax_state *state, long queries, long padded_dim,
                          const float *sinks, long group) {
    for (long q = 0; q < queries; q++) {
        state->max_score[q] = sinks ? sinks[q % group] : UNSEEN_SCORE;
        state->total[q] = sinks ? 1 : 0;
        memset(state->sums + q * MAX_HEAD_DIM, 0, padded_dim * sizeof *state->sums);
    }
}

/* Add 64 positions to the softmax of `count` queries, the first of which is `q`. */
static void add_values(struct softmax_state *state, long q, int count, const float *const *values,
                       const uint64_t *visible, float scores[][KEY_BLOCK], float scale,
                       long padded_dim) {
    float rescale[TILE_QUERIES], *sums = state->sums + q * MAX_HEAD_DIM;
    for (int t = 0; t < count; t++)
        rescale[t] = softmax_weights(scores[t], visible[t], scale, state->max_score + q + t,
                                     state->total + q + t);
    if (count == 1) tile_values(1, VECTORS, values, visible, scores, rescale, padded_dim, sums);
    else if (count == 2)
        tile_values(2, VECTORS, values, visible, scores, rescale, padded_dim, sums);
    else if (count == 3)
        tile_values(3, VECTORS, values, visible, scores, rescale, padded_dim, sums);
    else tile_values(4, FULL_TILE_VECTORS, values, visible, scores, rescale, padded_dim, sums);
}
