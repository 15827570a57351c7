/* y = x W' + bias for rows of bf16, W in bf16 or in int8 with a scale per output.

   W is laid out once, in panels of 48 outputs: [panel][k / 2][48][2] in bf16 and [panel][k / 4][48][4] in int8, as the
   dot products want them: a word of 32 bits holds the next inputs of one output. A panel is read once, in order, for up
   to 8 rows: with so few, memory is what limits. A row's sums run over the inputs in order, in registers of its own, so
   that its bits depend on nothing but the row.

   With int8, x becomes int8 too: 64 inputs of a row share a step, so that a large one spoils but its neighbors. The dot
   product takes one side without a sign, so W is stored with 128 added, and what that adds is taken off per row:
   y = scale * (sum over groups of step * (sum of q * (w + 128)) - sum over groups of step * 128 * (sum of q)). */

#include "matrix.h"

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#include <immintrin.h>
#include <math.h>
#include <stdlib.h>

#define WIDE 3   /* registers of 16 outputs in a panel */
#define PANEL (16 * WIDE)
#define TILE 8   /* rows */
#define GROUP 64 /* inputs that share a step */

typedef int8_t bytes __attribute__((vector_size(LANES)));

int panel_width(void) { return PANEL; }

static long panels_of(long n) { return (n + PANEL - 1) / PANEL; }

static long words_of(const struct matrix *m) { return m->scales ? (m->k + GROUP - 1) / GROUP * GROUP / 4 : m->k / 2; }

/* weight [n, k] of `size` bytes each -> packed [panels][words][48]; zero what is not there. int8 has 128 added. */
void pack(const char *weight, char *packed, long n, long k, long size, long words) {
    for (long p = 0; p < panels_of(n); p++)
        for (long i = 0; i < 4 * words; i += 4)
            for (long row = p * PANEL; row < (p + 1) * PANEL; row++, packed += 4) {
                memset(packed, 0, 4);
                if (row < n && i < k * size) memcpy(packed, weight + row * k * size + i, least(4, k * size - i));
                if (size == 1)
                    for (int byte = 0; byte < 4; byte++) packed[byte] ^= (char)128;
            }
}

/* `rows` (a constant) rows of x [rows][stride] against one panel [words][WIDE], both in words. */
static inline __attribute__((always_inline)) void
tile_bf16(const int rows, const int *x, long stride, const char *panel, long words, vec sum[][WIDE]) {
    __m512 mine[TILE][WIDE];
    for (int r = 0; r < rows; r++)
        for (int w = 0; w < WIDE; w++) mine[r][w] = _mm512_setzero_ps();
    for (long i = 0; i < words; i++) {
        __m512bh weight[WIDE];
        for (int w = 0; w < WIDE; w++) weight[w] = (__m512bh)_mm512_loadu_si512(panel + (i * WIDE + w) * 64);
        for (int r = 0; r < rows; r++) {
            __m512bh word = (__m512bh)_mm512_set1_epi32(x[r * stride + i]);
            for (int w = 0; w < WIDE; w++) mine[r][w] = _mm512_dpbf16_ps(mine[r][w], word, weight[w]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int w = 0; w < WIDE; w++) sum[r][w] = (vec)mine[r][w];
}

/* The intrinsic takes 8 numbers of 64 bits for 16 of 32, and gcc 12 moves every sum to memory and back for that. */
static inline ints dot_int8(ints sum, ints x, ints weight) {
    __asm__("vpdpbusd %1, %2, %0" : "+v"(sum) : "v"(x), "v"(weight));
    return sum;
}

/* The same with int8; steps [rows][groups]. */
static inline __attribute__((always_inline)) void
tile_int8(const int rows, const int *x, long stride, const float *steps, const char *panel, vec sum[][WIDE]) {
    long groups = stride * 4 / GROUP;
    for (int r = 0; r < rows; r++)
        for (int w = 0; w < WIDE; w++) sum[r][w] = all(0);
    for (long g = 0; g < groups; g++) {
        ints mine[TILE][WIDE];
        for (int r = 0; r < rows; r++)
            for (int w = 0; w < WIDE; w++) mine[r][w] = (ints){0};
        for (long i = g * GROUP / 4; i < (g + 1) * GROUP / 4; i++) {
            ints weight[WIDE];
            for (int w = 0; w < WIDE; w++) memcpy(&weight[w], panel + (i * WIDE + w) * 64, 64);
            for (int r = 0; r < rows; r++)
                for (int w = 0; w < WIDE; w++) mine[r][w] = dot_int8(mine[r][w], x[r * stride + i] - (ints){0}, weight[w]);
        }
        for (int r = 0; r < rows; r++)
            for (int w = 0; w < WIDE; w++) sum[r][w] += __builtin_convertvector(mine[r][w], vec) * steps[r * groups + g];
    }
}

#define CASE(rows) \
    case rows: \
        if (steps) tile_int8(rows, x, stride, steps, panel, sum); \
        else tile_bf16(rows, x, stride, panel, words, sum); \
        break;

static void sums_of(long rows, const int *x, long stride, const float *steps, const char *panel, long words,
                    vec sum[][WIDE]) {
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) }
}

/* A row of x in int8: q [groups * 64], the steps of its groups, and what the 128 added to W comes to. */
static void bytes_of(const bf16 *x, int8_t *q, float *steps, float *extra, long k, long groups) {
    *extra = 0;
    for (long g = 0; g < groups; g++) {
        vec part[GROUP / LANES], top = {0};
        for (int i = 0; i < GROUP / LANES; i++) {
            long at = g * GROUP + i * LANES;
            part[i] = load_bf16(x + at, k - at);
            vec size = (vec)((bits)part[i] & 0x7fffffff);
            top = pick(size <= top, top, size); /* infinity comes through; a NaN shows in `total` */
        }
        float most = 0;
        for (int l = 0; l < LANES; l++) most = top[l] <= most ? most : top[l];
        float per = most > 1e-30f ? 127 / most : 0;
        vec total = {0};
        for (int i = 0; i < GROUP / LANES; i++) {
            vec whole = part[i] * per + 12582912.0f - 12582912.0f; /* to the nearest */
            bytes narrow = __builtin_convertvector(__builtin_convertvector(whole, ints), bytes);
            memcpy(q + g * GROUP + i * LANES, &narrow, sizeof narrow);
            total += whole;
        }
        steps[g] = most - most == 0 ? most / 127 : NAN; /* what is not finite makes the whole row so */
        *extra += steps[g] * 128 * sum_of(total);
    }
}

/* One panel, its outputs from `from` on, for all rows. x in words; steps [rows][groups] and extra [rows] with int8. */
static void panel_rows(const struct matrix *m, const int *x, long stride, const float *steps, const float *extra,
                       const char *panel, bf16 *y, long rows, long from) {
    long tiles = (rows + TILE - 1) / TILE, each = (rows + tiles - 1) / tiles, words = words_of(m);
    for (long start = 0; start < rows; start += each) {
        vec sum[TILE][WIDE];
        long count = least(each, rows - start);
        const float *mine = steps ? steps + start * (words * 4 / GROUP) : 0;
        sums_of(count, x + start * stride, stride, mine, panel, words, sum);
        for (long r = 0; r < count; r++)
            for (long at = from; at < least(from + PANEL, m->n); at += LANES) {
                vec out = sum[r][(at - from) / LANES];
                if (steps) out = (out - extra[start + r]) * load_f32(m->scales + at, m->n - at);
                if (m->bias) out += load_bf16(m->bias + at, m->n - at);
                store_bf16(y + (start + r) * m->n + at, out, m->n - at);
            }
    }
}

/* x [T, k], rows x_row apart (an even number) -> y [T, n]. */
void multiply(const struct matrix *m, const bf16 *x, bf16 *y, long rows, long x_row, int threads) {
    if (!rows) return;
    long words = words_of(m), groups = words * 4 / GROUP, stride = m->scales ? words : x_row / 2;
    float *steps = m->scales ? malloc(rows * (groups + 1 + words) * 4) : 0, *extra = steps + rows * groups;
    int8_t *q = (int8_t *)(extra + rows);
    if (m->scales && !steps) { /* no memory: not numbers, which the engine tells */
        memset(y, 0xff, rows * m->n * sizeof *y);
        return;
    }
#pragma omp parallel num_threads(threads)
    {
        if (steps) {
#pragma omp for schedule(static)
            for (long r = 0; r < rows; r++)
                bytes_of(x + r * x_row, q + r * words * 4, steps + r * groups, extra + r, m->k, groups);
        }
#pragma omp for schedule(static)
        for (long p = 0; p < panels_of(m->n); p++)
            panel_rows(m, steps ? (const int *)q : (const int *)x, stride, steps, extra,
                       (const char *)m->packed + p * words * PANEL * 4, y, rows, p * PANEL);
    }
    free(steps);
}
#else
int panel_width(void) { return 0; }
#endif
