/* y = x W' + bias for rows of bf16, W in bf16 or in int8 with a scale per output.

   W is laid out once, in panels of 48 outputs: [panel][k / 2][48][2] in bf16 and [panel][k / 4][48][4] in int8, as the
   dot products want them: a word of 32 bits holds the next inputs of one output. A panel is read once, in order, for up
   to 8 rows: with so few, memory is what limits. A row's sums run over the inputs in order, in registers of its own, so
   that its bits depend on nothing but the row.

   With int8, a row of x becomes int8 too, with a scale of its own: x is about step * (u - 128), u of 1..255. Then
   y = step * scale * (sum of u * w - 128 * sum of w), all whole numbers up to the last product. */

#include "matrix.h"

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#include <immintrin.h>
#include <math.h>
#include <stdlib.h>

#define WIDE 3 /* registers of 16 outputs in a panel */
#define PANEL (16 * WIDE)
#define TILE 8 /* rows */

int panel_width(void) { return PANEL; }

static long panels_of(long n) { return (n + PANEL - 1) / PANEL; }

static long words_of(const struct matrix *m) { return m->scales ? (m->k + 3) / 4 : m->k / 2; }

/* weight [n, k] of `size` bytes each -> packed, ceil(n / 48) * 48 * ceil(k * size / 4) words; zero what is not there. */
void pack(const char *weight, char *packed, long n, long k, long size) {
    for (long p = 0; p < panels_of(n); p++)
        for (long i = 0; i < k * size; i += 4)
            for (long row = p * PANEL; row < (p + 1) * PANEL; row++, packed += 4) {
                memset(packed, 0, 4);
                if (row < n) memcpy(packed, weight + row * k * size + i, least(4, k * size - i));
            }
}

/* `rows` (a constant) rows of x [rows][stride] against one panel [words][WIDE], both in words. Once a kind: the
   compiler keeps sums in registers only if they have one type all the way. */
#define DEFINE_TILE(name, sums, inputs, dot) \
    static inline __attribute__((always_inline)) void \
    name(const int rows, const int *x, long stride, const char *panel, long words, vec sum[][WIDE]) { \
        sums mine[TILE][WIDE]; \
        for (int r = 0; r < rows; r++) \
            for (int w = 0; w < WIDE; w++) mine[r][w] = (sums){0}; \
        for (long i = 0; i < words; i++) { \
            inputs weight[WIDE]; \
            for (int w = 0; w < WIDE; w++) weight[w] = (inputs)_mm512_loadu_si512(panel + (i * WIDE + w) * 64); \
            for (int r = 0; r < rows; r++) { \
                inputs word = (inputs)_mm512_set1_epi32(x[r * stride + i]); \
                for (int w = 0; w < WIDE; w++) mine[r][w] = dot(mine[r][w], word, weight[w]); \
            } \
        } \
        for (int r = 0; r < rows; r++) \
            for (int w = 0; w < WIDE; w++) sum[r][w] = (vec)mine[r][w]; \
    }

/* The intrinsic takes 8 numbers of 64 bits for 16 of 32, and gcc 12 moves every sum to memory and back for that. */
static inline ints dot_int8(ints sum, ints word, ints weight) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(word), "v"(weight));
    return sum;
}

DEFINE_TILE(tile_bf16, __m512, __m512bh, _mm512_dpbf16_ps)
DEFINE_TILE(tile_int8, ints, ints, dot_int8)

#define CASE(rows) \
    case rows: \
        if (eight) tile_int8(rows, x, stride, panel, words, sum); \
        else tile_bf16(rows, x, stride, panel, words, sum); \
        break;

static void sums_of(long rows, int eight, const int *x, long stride, const char *panel, long words, vec sum[][WIDE]) {
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) }
}

/* One panel, its outputs from `from` on, for all rows. x in words; steps [rows] with int8. */
static void panel_rows(const struct matrix *m, const int *x, long stride, const float *steps, const char *panel,
                       bf16 *y, long rows, long from) {
    long tiles = (rows + TILE - 1) / TILE, each = (rows + tiles - 1) / tiles;
    for (long start = 0; start < rows; start += each) {
        vec sum[TILE][WIDE];
        long count = least(each, rows - start);
        sums_of(count, steps != 0, x + start * stride, stride, panel, words_of(m), sum);
        for (long r = 0; r < count; r++)
            for (long at = from; at < least(from + PANEL, m->n); at += LANES) {
                vec out = sum[r][(at - from) / LANES];
                if (steps) {
                    ints of_w = {0};
                    memcpy(&of_w, m->sums + at, least(LANES, m->n - at) * sizeof *m->sums);
                    out = __builtin_convertvector((ints)out - 128 * of_w, vec);
                    out *= load_f32(m->scales + at, m->n - at) * steps[start + r];
                }
                if (m->bias) out += load_bf16(m->bias + at, m->n - at);
                store_bf16(y + (start + r) * m->n + at, out, m->n - at);
            }
    }
}

/* One row x [k] as bytes u [4 words], 128 for zero. Returns its step; a row that is not finite gets a step of NaN. */
static float bytes_of(const bf16 *x, uint8_t *u, long k, long words) {
    vec top = {0};
    for (long i = 0; i < k; i += LANES) {
        vec wide = load_bf16(x + i, k - i), size = (vec)((bits)wide & 0x7fffffff);
        top = pick(size <= top, top, size); /* a NaN comes through */
    }
    float most = 0;
    for (int l = 0; l < LANES; l++) most = top[l] <= most ? most : top[l];
    float step = most / 127, per = most > 0 ? 127 / most : 0;
    for (long i = 0; i < 4 * words; i += LANES) {
        vec near = load_bf16(x + i, k - i) * per + 12582912.0f; /* to the nearest: it lies in the last bits */
        typedef uint8_t bytes __attribute__((vector_size(LANES)));
        bytes out = __builtin_convertvector(((bits)near & 0xff) ^ 128, bytes);
        memcpy(u + i, &out, least(LANES, 4 * words - i));
    }
    return most - most == 0 ? step : NAN;
}

/* x [T, k], rows x_row apart (an even number) -> y [T, n]. */
void multiply(const struct matrix *m, const bf16 *x, bf16 *y, long rows, long x_row, int threads) {
    long words = words_of(m), stride = m->scales ? words : x_row / 2;
    float *steps = m->scales ? malloc(rows * (words + 1) * 4) : 0;
    uint8_t *bytes = (uint8_t *)(steps + rows);
#pragma omp parallel num_threads(threads)
    {
        if (steps) {
#pragma omp for schedule(static)
            for (long r = 0; r < rows; r++) steps[r] = bytes_of(x + r * x_row, bytes + r * words * 4, m->k, words);
        }
#pragma omp for schedule(static)
        for (long p = 0; p < panels_of(m->n); p++)
            panel_rows(m, steps ? (const int *)bytes : (const int *)x, stride, steps,
                       (const char *)m->packed + p * words * PANEL * 4, y, rows, p * PANEL);
    }
    free(steps);
}
#else
int panel_width(void) { return 0; }
#endif
