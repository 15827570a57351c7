/* y = x W' + bias for rows of bf16, W in bf16 or in int8 with a scale per output.

   W is packed once, in panels of 48 outputs: [panel][k / 2][48][2] in bf16 and
   [panel][k / 4][48][4] in int8, as the dot products read it: a word of 32 bits holds consecutive
   inputs of one output. A panel is read once, in order, for up to 8 rows: with so few rows, memory
   bandwidth is the limit. The sums of a row run over the inputs in order, in their own registers,
   so its bits depend only on the row.

   With int8, x is quantized too: 64 inputs of a row share a step (scale), so that a large input
   costs precision in its group only. The dot product takes one unsigned operand, so W is stored
   with 128 added, and the effect of that is subtracted per row:

   y = scale * (sum over groups of step * (sum of q * (w + 128))
                - sum over groups of step * 128 * (sum of q)). */

#include "matrix.h"

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#include <immintrin.h>
#include <math.h>
#include <stdlib.h>

#define PANEL_VECTORS 3 /* registers of 16 outputs in a panel */
#define PANEL         (16 * PANEL_VECTORS)
#define MAX_TILE_ROWS 8
#define INPUT_GROUP   64 /* inputs that share a step */

typedef int8_t bytes __attribute__((vector_size(LANES)));

int panel_width(void) { return PANEL; }

static long panel_count(long n) { return (n + PANEL - 1) / PANEL; }

static long word_count(const struct matrix *m) {
    return m->scales ? (m->k + INPUT_GROUP - 1) / INPUT_GROUP * INPUT_GROUP / 4 : m->k / 2;
}

/* weight [n, k] with `size` bytes per number -> packed [panels][words][48], padded with zeros.
   int8 gets 128 added. */
void pack(const char *weight, char *packed, long n, long k, long size, long words) {
    for (long p = 0; p < panel_count(n); p++)
        for (long i = 0; i < 4 * words; i += 4)
            for (long row = p * PANEL; row < (p + 1) * PANEL; row++, packed += 4) {
                memset(packed, 0, 4);
                if (row < n && i < k * size)
                    memcpy(packed, weight + row * k * size + i, min_long(4, k * size - i));
                if (size == 1)
                    for (int byte = 0; byte < 4; byte++) packed[byte] ^= (char)128;
            }
}

/* Multiply rows of x [rows][stride] with one panel [words][PANEL_VECTORS], both in words. `rows` is
   a constant. */
static inline __attribute__((always_inline)) void tile_bf16(const int rows, const int *x,
                                                            long stride, const char *panel,
                                                            long words, vec sum[][PANEL_VECTORS]) {
    __m512 partial[MAX_TILE_ROWS][PANEL_VECTORS];
    for (int r = 0; r < rows; r++)
        for (int w = 0; w < PANEL_VECTORS; w++) partial[r][w] = _mm512_setzero_ps();
    for (long i = 0; i < words; i++) {
        __m512bh weight[PANEL_VECTORS];
        for (int w = 0; w < PANEL_VECTORS; w++)
            weight[w] = (__m512bh)_mm512_loadu_si512(panel + (i * PANEL_VECTORS + w) * 64);
        for (int r = 0; r < rows; r++) {
            __m512bh word = (__m512bh)_mm512_set1_epi32(x[r * stride + i]);
            for (int w = 0; w < PANEL_VECTORS; w++)
                partial[r][w] = _mm512_dpbf16_ps(partial[r][w], word, weight[w]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int w = 0; w < PANEL_VECTORS; w++) sum[r][w] = (vec)partial[r][w];
}

/* gcc 12 moves every sum to memory and back for the intrinsic, whose operands have 64-bit lanes. */
static inline ints dot_int8(ints sum, ints x, ints weight) {
    __asm__("vpdpbusd %1, %2, %0" : "+v"(sum) : "v"(x), "v"(weight));
    return sum;
}

/* The same for int8; steps [rows][groups]. */
static inline __attribute__((always_inline)) void tile_int8(const int rows, const int *x,
                                                            long stride, const float *steps,
                                                            const char *panel,
                                                            vec sum[][PANEL_VECTORS]) {
    long groups = stride * 4 / INPUT_GROUP;
    for (int r = 0; r < rows; r++)
        for (int w = 0; w < PANEL_VECTORS; w++) sum[r][w] = splat(0);
    for (long g = 0; g < groups; g++) {
        ints partial[MAX_TILE_ROWS][PANEL_VECTORS];
        for (int r = 0; r < rows; r++)
            for (int w = 0; w < PANEL_VECTORS; w++) partial[r][w] = (ints){0};
        for (long i = g * INPUT_GROUP / 4; i < (g + 1) * INPUT_GROUP / 4; i++) {
            ints weight[PANEL_VECTORS];
            for (int w = 0; w < PANEL_VECTORS; w++)
                memcpy(&weight[w], panel + (i * PANEL_VECTORS + w) * 64, 64);
            for (int r = 0; r < rows; r++)
                for (int w = 0; w < PANEL_VECTORS; w++)
                    partial[r][w] =
                        dot_int8(partial[r][w], x[r * stride + i] - (ints){0}, weight[w]);
        }
        for (int r = 0; r < rows; r++)
            for (int w = 0; w < PANEL_VECTORS; w++)
                sum[r][w] += __builtin_convertvector(partial[r][w], vec) * steps[r * groups + g];
    }
}

#define CASE(rows)                                                                                 \
    case rows:                                                                                     \
        if (steps) tile_int8(rows, x, stride, steps, panel, sum);                                  \
        else tile_bf16(rows, x, stride, panel, words, sum);                                        \
        break;

static void tile_sums(long rows, const int *x, long stride, const float *steps, const char *panel,
                      long words, vec sum[][PANEL_VECTORS]) {
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) }
}

/* Quantize a row of x: q [groups * 64], the steps of its groups, and the effect (`extra`) of the
   128 added to W. */
static void quantize_row(const bf16 *x, int8_t *q, float *steps, float *extra, long k,
                         long groups) {
    *extra = 0;
    for (long g = 0; g < groups; g++) {
        vec part[INPUT_GROUP / LANES], top = {0};
        for (int i = 0; i < INPUT_GROUP / LANES; i++) {
            long at = g * INPUT_GROUP + i * LANES;
            part[i] = load_bf16(x + at, k - at);
            vec size = (vec)((bits)part[i] & 0x7fffffff);
            top = blend(size <= top, top, size); /* keeps infinity; a NaN shows in `total` */
        }
        float max_abs = 0;
        for (int l = 0; l < LANES; l++) max_abs = top[l] <= max_abs ? max_abs : top[l];
        float inverse_step = max_abs > 1e-30f ? 127 / max_abs : 0;
        vec total = {0};
        for (int i = 0; i < INPUT_GROUP / LANES; i++) {
            /* rounds to an integer */
            vec whole = part[i] * inverse_step + 12582912.0f - 12582912.0f;
            bytes narrow = __builtin_convertvector(__builtin_convertvector(whole, ints), bytes);
            memcpy(q + g * INPUT_GROUP + i * LANES, &narrow, sizeof narrow);
            total += whole;
        }
        /* A number that is not finite makes the row NaN. */
        steps[g] = max_abs - max_abs == 0 ? max_abs / 127 : NAN;
        *extra += steps[g] * 128 * sum_lanes(total);
    }
}

/* Compute the outputs of one panel, which begin at `from`, for all rows. x is in words; int8 has
   steps [rows][groups] and extra [rows]. */
static void panel_rows(const struct matrix *m, const int *x, long stride, const float *steps,
                       const float *extra, const char *panel, bf16 *y, long rows, long from) {
    long tiles = (rows + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS, each = (rows + tiles - 1) / tiles,
         words = word_count(m);
    for (long start = 0; start < rows; start += each) {
        vec sum[MAX_TILE_ROWS][PANEL_VECTORS];
        long count = min_long(each, rows - start);
        const float *tile_steps = steps ? steps + start * (words * 4 / INPUT_GROUP) : 0;
        tile_sums(count, x + start * stride, stride, tile_steps, panel, words, sum);
        for (long r = 0; r < count; r++)
            for (long at = from; at < min_long(from + PANEL, m->n); at += LANES) {
                vec out = sum[r][(at - from) / LANES];
                if (steps) out = (out - extra[start + r]) * load_f32(m->scales + at, m->n - at);
                if (m->bias) out += load_bf16(m->bias + at, m->n - at);
                store_bf16(y + (start + r) * m->n + at, out, m->n - at);
            }
    }
}

/* x [T, k] with an even row stride -> y [T, n]. */
void multiply(const struct matrix *m, const bf16 *x, bf16 *y, long rows, long x_row, int threads) {
    if (!rows) return;
    long words = word_count(m), groups = words * 4 / INPUT_GROUP,
         stride = m->scales ? words : x_row / 2;
    float *steps = m->scales ? malloc(rows * (groups + 1 + words) * 4) : 0,
          *extra = steps + rows * groups;
    int8_t *q = (int8_t *)(extra + rows);
    if (m->scales && !steps) { /* out of memory: NaNs, which the engine reports */
        memset(y, 0xff, rows * m->n * sizeof *y);
        return;
    }
#pragma omp parallel num_threads(threads)
    {
        if (steps) {
#pragma omp for schedule(static)
            for (long r = 0; r < rows; r++)
                quantize_row(x + r * x_row, q + r * words * 4, steps + r * groups, extra + r, m->k,
                             groups);
        }
#pragma omp for schedule(static)
        for (long p = 0; p < panel_count(m->n); p++)
            panel_rows(m, steps ? (const int *)q : (const int *)x, stride, steps, extra,
                       (const char *)m->packed + p * words * PANEL * 4, y, rows, p * PANEL);
    }
    free(steps);
}
#else
int panel_width(void) { return 0; }
#endif
