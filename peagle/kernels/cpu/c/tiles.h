/* The products of a tile: a few rows with a panel. Sums stay in registers.

   The sum of a row runs over the inputs in order, so its bits depend only on the row. */
#pragma once
#include "block_format.h"
#include "dot.h"

/* The rows of a product, as the tiles read them. */
struct prepared_rows {
    const float *wide;    /* float32: rows, or tiles [k][TILE_ROWS]; */
    const int32_t *pairs; /* or pairs of bf16; */
    const int32_t *q;     /* or int8, in words of four */
    const float *steps;   /* of int8: [rows][k / 32] */
    const float *totals;  /* of int8 and bf16: [rows][k / 16], the sums of 16 inputs */
    long row;             /* stride of rows, in words */
    int tiled;
};

INLINE void clear(const int rows, vec sums[][PANEL_VECTORS]) {
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < PANEL_VECTORS; v++) sums[r][v] = splat(0);
}

INLINE void copy(const int rows, const vec from[][PANEL_VECTORS], vec to[][PANEL_VECTORS]) {
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < PANEL_VECTORS; v++) to[r][v] = from[r][v];
}

/* ---- rows of float32 ---- */

/* Two words of a panel, which hold eight inputs of a block; BF16: four. */
struct word_pair {
    bits words[4][PANEL_VECTORS];
};

INLINE struct word_pair load_pair(const enum format format, const uint8_t *body, int pair) {
    struct word_pair loaded;
    if (WIDENS_BY_LOOKUP && has_four_bits(format)) {
        for (int v = 0; v < PANEL_VECTORS; v++)
            loaded.words[0][v] = load_four_bits(format, body, v, pair);
        return loaded;
    }
    for (int i = 0; i < (format == BF16 ? 4 : 2); i++)
        for (int v = 0; v < PANEL_VECTORS; v++)
            loaded.words[i][v] = format == BF16
                                     ? load_word(body + (pair * 4 + i) * PANEL * 4, v)
                                     : load_codes(format, body, v, pair, i);
    return loaded;
}

/* Input i of eight as float32. */
INLINE vec widen_input(const enum format format, const struct word_pair *pair, const int i,
                       int vector, vec scale, vec minimum) {
    if (format == BF16) {
        bits word = pair->words[i / 2][vector];
        return (vec)(i % 2 ? word & 0xffff0000 : word << 16);
    }
    const int odd = i / 2 % 2, byte = i / 4 + i % 2 * 2; /* the inverse of CODE_INPUT */
    if (WIDENS_BY_LOOKUP && has_four_bits(format)) {
        bits word = pair->words[0][vector] >> (byte * 8 + odd * 4);
        return multiply_add(look_up(format, word), scale, minimum);
    }
    return multiply_add(widen_code(format, pair->words[odd][vector], byte), scale, minimum);
}

/* Widen 32 inputs of a panel: wide [32][PANEL]. */
INLINE void widen_block(const enum format format, struct block block, float *wide) {
    vec scale[PANEL_VECTORS], minimum[PANEL_VECTORS];
    for (int pair = 0; pair < BLOCK / 8; pair++) {
        if (pair % 2 == 0) unpack_scales(format, block, pair / 2, scale, minimum);
        struct word_pair words = load_pair(format, block.body, pair);
        for (int i = 0; i < 8; i++, wide += PANEL)
            for (int v = 0; v < PANEL_VECTORS; v++)
                *(vec_at *)(wide + v * LANES) =
                    widen_input(format, &words, i, v, scale[v], minimum[v]);
    }
}

/* Widen weights in registers and multiply: for few rows. */
INLINE void tile_blocks(const enum format format, const int rows, const float *x, long row,
                        const uint8_t *panel, long k, vec sums[][PANEL_VECTORS]) {
    vec sum[TILE_ROWS][PANEL_VECTORS];
    clear(rows, sum);
    for (long at = 0; at < k; at += BLOCK) {
        struct block block = block_at(format, panel, at / BLOCK);
        for (int half = 0; half < HALVES(format); half++) {
            vec scale[PANEL_VECTORS], minimum[PANEL_VECTORS];
            unpack_scales(format, block, half, scale, minimum);
            int end = (half + 1) * 4 / HALVES(format);
            for (int pair = half * 2; pair < end; pair++) {
                const float *numbers = x + at + pair * 8;
                struct word_pair words = load_pair(format, block.body, pair);
                for (int i = 0; i < 8; i++) {
                    vec weight[PANEL_VECTORS];
                    for (int v = 0; v < PANEL_VECTORS; v++)
                        weight[v] = widen_input(format, &words, i, v, scale[v], minimum[v]);
                    for (int r = 0; r < rows; r++)
                        for (int v = 0; v < PANEL_VECTORS; v++)
                            sum[r][v] =
                                multiply_add(splat(numbers[r * row + i]), weight[v], sum[r][v]);
                }
            }
        }
    }
    copy(rows, sum, sums);
}

/* Add the products with `count` inputs that are widened already; x [count][TILE_ROWS]. */
INLINE void tile_wide(const int rows, const float *x, const float *wide, long count,
                      vec sums[][PANEL_VECTORS]) {
    vec sum[TILE_ROWS][PANEL_VECTORS];
    copy(rows, sums, sum);
    for (long i = 0; i < count; i++) {
        vec weight[PANEL_VECTORS];
        for (int v = 0; v < PANEL_VECTORS; v++)
            weight[v] = *(const vec_at *)(wide + i * PANEL + v * LANES);
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < PANEL_VECTORS; v++)
                sum[r][v] = multiply_add(splat(x[i * TILE_ROWS + r]), weight[v], sum[r][v]);
    }
    copy(rows, sum, sums);
}

/* ---- rows of bf16, where the CPU has dot products of pairs ---- */

#ifdef HAS_PAIR_DOT
/* Weights in bf16. */
INLINE void tile_pairs(const int rows, const int32_t *x, long row, const uint8_t *panel,
                       long pairs, vec sums[][PANEL_VECTORS]) {
    vec sum[TILE_ROWS][PANEL_VECTORS];
    clear(rows, sum);
    for (long i = 0; i < pairs; i++) {
        bits weight[PANEL_VECTORS];
        for (int v = 0; v < PANEL_VECTORS; v++) weight[v] = load_word(panel + i * PANEL * 4, v);
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < PANEL_VECTORS; v++)
                sum[r][v] = dot_pair(sum[r][v], x[r * row + i], weight[v]);
    }
    copy(rows, sum, sums);
}

/* dot[r] = the products of x with the codes of `pairs` pairs of words: codes of up to 8 bits are
   exact in bf16. */
INLINE void dot_code_pairs(const enum format format, const int rows, const int first,
                           const int pairs, const uint8_t *body, const int32_t *x, long row,
                           vec dot[][PANEL_VECTORS]) {
    clear(rows, dot);
    for (int pair = first; pair < first + pairs; pair++)
        for (int i = 0; i < 4; i++) { /* inputs 2 i and 2 i + 1 */
            bits weight[PANEL_VECTORS];
            for (int v = 0; v < PANEL_VECTORS; v++)
                weight[v] = widen_pair(format, body, v, pair, i);
            for (int r = 0; r < rows; r++)
                for (int v = 0; v < PANEL_VECTORS; v++)
                    dot[r][v] = dot_pair(dot[r][v], x[r * row + pair * 4 + i], weight[v]);
        }
}
#endif

/* ---- codes: the sum of half a block is multiplied with its scale ---- */

/* Rows of int8, or of bf16 where the CPU has dot products of pairs. */
INLINE void tile_codes(const enum format format, const int rows, const int is_int8,
                       const struct prepared_rows *x, long start, const uint8_t *panel, long k,
                       vec sums[][PANEL_VECTORS]) {
    const int halves = HALVES(format), pairs = 4 / halves, shift = signed_shift(format);
    const float *totals = x->totals + start * (k / 16), *steps = x->steps + start * (k / BLOCK);
    vec sum[CODE_ROWS][PANEL_VECTORS];
    clear(rows, sum);
    for (long b = 0; b < k / BLOCK; b++) {
        struct block block = block_at(format, panel, b);
        for (int half = 0; half < halves; half++) {
            vec dot[CODE_ROWS][PANEL_VECTORS], scale[PANEL_VECTORS], minimum[PANEL_VECTORS];
            if (is_int8) {
                ints whole[CODE_ROWS][PANEL_VECTORS];
                dot_words(format, rows, half * 2, pairs, block.body,
                          x->q + start * x->row + b * 8, x->row, whole);
                for (int r = 0; r < rows; r++)
                    for (int v = 0; v < PANEL_VECTORS; v++)
                        dot[r][v] = __builtin_convertvector(whole[r][v], vec) *
                                    steps[r * (k / BLOCK) + b];
            }
#ifdef HAS_PAIR_DOT
            else
                dot_code_pairs(format, rows, half * 2, pairs, block.body,
                               x->pairs + start * x->row + b * 16, x->row, dot);
#endif
            unpack_scales(format, block, half, scale, minimum);
            for (int v = 0; v < PANEL_VECTORS; v++)
                if (is_int8 && has_signed_codes(format)) minimum[v] = scale[v] * (float)-shift;
            for (int r = 0; r < rows; r++) {
                const float *parts = totals + r * (k / 16) + b * 2 + half;
                float total = halves == 1 ? parts[0] + parts[1] : parts[0];
                for (int v = 0; v < PANEL_VECTORS; v++) {
                    sum[r][v] = multiply_add(dot[r][v], scale[v], sum[r][v]);
                    if (!has_signed_codes(format) || (is_int8 && shift))
                        sum[r][v] = multiply_add(splat(total), minimum[v], sum[r][v]);
                }
            }
        }
    }
    copy(rows, sum, sums);
}

/* ---- the functions of a format (format.c), by its name ---- */

struct format_functions {
    /* Widen inputs from .. from + count - 1 of a panel: wide [count][PANEL]. */
    void (*widen)(const uint8_t *panel, long from, long count, float *wide);
    /* The sums of up to TILE_ROWS rows, the first of which is `start`. */
    void (*multiply)(const struct prepared_rows *x, long start, long rows, const uint8_t *panel,
                     long k, vec sums[][PANEL_VECTORS]);
};

#define DECLARE_FORMAT(format)                                                                     \
    void widen_##format(const uint8_t *panel, long from, long count, float *wide);                 \
    void multiply_##format(const struct prepared_rows *x, long start, long rows,                   \
                           const uint8_t *panel, long k, vec sums[][PANEL_VECTORS]);
DECLARE_FORMAT(BF16)
DECLARE_FORMAT(INT8)
DECLARE_FORMAT(Q4_0)
DECLARE_FORMAT(Q4_1)
DECLARE_FORMAT(Q5_0)
DECLARE_FORMAT(Q5_1)
DECLARE_FORMAT(Q8_0)
DECLARE_FORMAT(Q4_K)
DECLARE_FORMAT(Q6_K)
DECLARE_FORMAT(MXFP4)
