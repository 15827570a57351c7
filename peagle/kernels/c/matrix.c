/* y = x W' + bias for rows of bf16, W in bf16 or in int8 with a scale per output.

   W is laid out once, in panels of 48 outputs: [panel][k / 2][48][2], the two inputs of a pair side by side as vdpbf16ps
   wants them. A panel is read once, in order, for up to 8 rows: with so few, memory is what limits. A row's sums run over
   the inputs in order, in registers of its own, so that its bits depend on nothing but the row. */

#include "matrix.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#include <stdlib.h>

#define WIDE 3 /* registers of 16 outputs in a panel */
#define PANEL (16 * WIDE)
#define TILE 8 /* rows */

int panel_width(void) { return PANEL; }

static long panels_of(long n) { return (n + PANEL - 1) / PANEL; }

/* weight [n, k] of `size` bytes each -> packed; outputs that are not there are zero. */
void pack(const char *weight, char *packed, long n, long k, long size) {
    for (long p = 0; p < panels_of(n); p++)
        for (long i = 0; i < k; i += 2)
            for (long row = p * PANEL; row < (p + 1) * PANEL; row++, packed += 2 * size) {
                if (row < n) memcpy(packed, weight + (row * k + i) * size, 2 * size);
                else memset(packed, 0, 2 * size);
            }
}

/* 32 numbers of int8 as bf16: all of them are exact. */
static inline __m512bh widened(const int8_t *p) {
    __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
    __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(p + 16))));
    return _mm512_cvtne2ps_pbh(high, low);
}

/* `rows` (a constant) rows of x against one panel: x [rows][stride] and panel [pairs][WIDE] in pairs of inputs. */
static inline __attribute__((always_inline)) void
tile(const int rows, const int eight, const int *x, long stride, const char *panel, long pairs, vec sum[][WIDE]) {
    __m512 mine[TILE][WIDE];
    for (int r = 0; r < rows; r++)
        for (int w = 0; w < WIDE; w++) mine[r][w] = _mm512_setzero_ps();
    for (long i = 0; i < pairs; i++) {
        __m512bh weight[WIDE];
        for (int w = 0; w < WIDE; w++)
            weight[w] = eight ? widened((const int8_t *)panel + (i * WIDE + w) * 32)
                              : (__m512bh)_mm512_loadu_si512(panel + (i * WIDE + w) * 64);
        for (int r = 0; r < rows; r++) {
            __m512bh pair = (__m512bh)_mm512_set1_epi32(x[r * stride + i]);
            for (int w = 0; w < WIDE; w++) mine[r][w] = _mm512_dpbf16_ps(mine[r][w], pair, weight[w]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int w = 0; w < WIDE; w++) sum[r][w] = (vec)mine[r][w];
}

#define CASE(rows) \
    case rows: \
        if (eight) tile(rows, 1, x, stride, panel, pairs, sum); \
        else tile(rows, 0, x, stride, panel, pairs, sum); \
        break;

static void sums_of(long rows, int eight, const int *x, long stride, const char *panel, long pairs, vec sum[][WIDE]) {
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) }
}

/* One panel, its outputs from `from` on, for all rows. */
static void panel_rows(const struct matrix *m, const bf16 *x, const char *panel, bf16 *y, long rows, long x_row,
                       long from, bf16 *wide) {
    int eight = m->scales != 0;
    if (wide) { /* every tile would widen it again */
        for (long i = 0; i < m->k * PANEL; i += 32)
            _mm512_storeu_si512(wide + i, (__m512i)widened((const int8_t *)panel + i));
        panel = (const char *)wide, eight = 0;
    }
    long tiles = (rows + TILE - 1) / TILE, each = (rows + tiles - 1) / tiles;
    for (long start = 0; start < rows; start += each) {
        vec sum[TILE][WIDE];
        long count = least(each, rows - start);
        sums_of(count, eight, (const int *)(x + start * x_row), x_row / 2, panel, m->k / 2, sum);
        for (long r = 0; r < count; r++)
            for (long at = from; at < least(from + PANEL, m->n); at += LANES) {
                vec out = sum[r][(at - from) / LANES];
                if (m->scales) out *= load_f32(m->scales + at, m->n - at);
                if (m->bias) out += load_bf16(m->bias + at, m->n - at);
                store_bf16(y + (start + r) * m->n + at, out, m->n - at);
            }
    }
}

/* x [T, k], rows x_row apart (an even number) -> y [T, n]. */
void multiply(const struct matrix *m, const bf16 *x, bf16 *y, long rows, long x_row, int threads) {
    long size = m->k * PANEL * (m->scales ? 1 : 2);
#pragma omp parallel num_threads(threads)
    {
        bf16 *wide = m->scales && rows > TILE ? malloc(m->k * PANEL * sizeof *wide) : 0;
#pragma omp for schedule(static)
        for (long p = 0; p < panels_of(m->n); p++)
            panel_rows(m, x, (const char *)m->packed + p * size, y, rows, x_row, p * PANEL, wide);
        free(wide);
    }
}
#else
int panel_width(void) { return 0; }
#endif
