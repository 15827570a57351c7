/* y = x W' + bias for few rows of bf16: what a decode step multiplies.

   The weight is laid out once, in panels of 48 outputs: [panel][K / 2][48][2], the two inputs of a pair side by side as
   vdpbf16ps wants them. A panel is read once, in order, for every 8 rows; a row's sums run over the inputs in order in
   registers of its own, so that its bits depend on nothing but the row. */

#include "common.h"

#ifdef __AVX512BF16__
#include <immintrin.h>

#define WIDE 3 /* registers of 16 outputs in a panel */
#define TILE 8 /* rows */

int panel_width(void) { return 16 * WIDE; }

/* weight [N, K] -> packed [ceil(N / 48)][ceil(K / 2)][48][2]; what is not there is zero. */
void pack(const bf16 *weight, bf16 *packed, long n, long k) {
    long pairs = (k + 1) / 2, panels = (n + 16 * WIDE - 1) / (16 * WIDE);
    for (long p = 0; p < panels; p++)
        for (long i = 0; i < pairs; i++)
            for (long o = 0; o < 16 * WIDE; o++)
                for (long s = 0; s < 2; s++) {
                    long row = p * 16 * WIDE + o, col = 2 * i + s;
                    *packed++ = row < n && col < k ? weight[row * k + col] : 0;
                }
}

/* `rows` (a constant) rows of x against one panel; x holds pairs, [rows][stride]. */
static inline __attribute__((always_inline)) void
tile(const int rows, const int *x, long stride, const char *panel, long pairs, __m512 sum[TILE][WIDE]) {
    for (int r = 0; r < rows; r++)
        for (int w = 0; w < WIDE; w++) sum[r][w] = _mm512_setzero_ps();
    for (long i = 0; i < pairs; i++) {
        __m512bh weight[WIDE];
        for (int w = 0; w < WIDE; w++) weight[w] = (__m512bh)_mm512_loadu_si512(panel + (i * WIDE + w) * 64);
        for (int r = 0; r < rows; r++) {
            __m512bh pair = (__m512bh)_mm512_set1_epi32(x[r * stride + i]);
            for (int w = 0; w < WIDE; w++) sum[r][w] = _mm512_dpbf16_ps(sum[r][w], pair, weight[w]);
        }
    }
}

static void panel_rows(const bf16 *x, const bf16 *panel, const bf16 *bias, bf16 *y, long rows, long n, long k,
                       long x_row, long from) {
    __m512 sum[TILE][WIDE];
    long pairs = k / 2, stride = x_row / 2;
    const int *at = (const int *)x;
    switch (rows) {
    case 1: tile(1, at, stride, (const char *)panel, pairs, sum); break;
    case 2: tile(2, at, stride, (const char *)panel, pairs, sum); break;
    case 3: tile(3, at, stride, (const char *)panel, pairs, sum); break;
    case 4: tile(4, at, stride, (const char *)panel, pairs, sum); break;
    case 5: tile(5, at, stride, (const char *)panel, pairs, sum); break;
    case 6: tile(6, at, stride, (const char *)panel, pairs, sum); break;
    case 7: tile(7, at, stride, (const char *)panel, pairs, sum); break;
    default: tile(8, at, stride, (const char *)panel, pairs, sum);
    }
    for (long r = 0; r < rows; r++)
        for (long w = 0; w < WIDE; w++) {
            long at = from + 16 * w;
            vec out = (vec)sum[r][w];
            if (bias) out += load_bf16(bias + at, n - at);
            store_bf16(y + r * n + at, out, n - at);
        }
}

/* x [T, K], rows x_row apart; packed as above; bias [N] or null; y [T, N]. K and x_row are even. */
void linear(const bf16 *x, const bf16 *packed, const bf16 *bias, bf16 *y, long rows, long n, long k, long x_row,
            int threads) {
    long panels = (n + 16 * WIDE - 1) / (16 * WIDE), size = k * 16 * WIDE;
    long tiles = (rows + TILE - 1) / TILE, each = (rows + tiles - 1) / tiles;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long p = 0; p < panels; p++)
        for (long r = 0; r < rows; r += each)
            panel_rows(x + r * x_row, packed + p * size, bias, y + r * n, each < rows - r ? each : rows - r, n, k,
                       x_row, p * 16 * WIDE);
}
#else
int panel_width(void) { return 0; }
#endif
