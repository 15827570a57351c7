/* y = x W' + bias, for rows of float32 or bf16 and weights packed as block_format.h describes.

   Rows of float32: weights are widened to float32 and multiplied. For a few rows that happens in
   registers, at the speed of memory; for many, a chunk of a panel is widened into the first-level
   cache, once for all rows. The bits are the same.

   Rows of bf16: as rows of float32, except where the CPU has dot products of pairs of bf16. Then
   weights in bf16 are multiplied as they are, and codes as numbers of bf16, which they are exactly:

     y = sum over blocks of scale * (sum of code * x) + minimum * (sum of x)

   With `int8_rows`, x is quantized too: 32 inputs of a row share a step. This takes a fraction of
   the instructions, but is not exact:

     y = sum over blocks of scale * step * (sum of code * q) + minimum * step * (sum of q) */

#include "matrix.h"
#include "block_format.h"
#include "dot.h"
#include "pool.h"
#include "tiles.h"
#include <math.h>
#include <stdlib.h>

#define CHUNK        (2048 / LANES) /* inputs that are widened at once: up to 24 KiB */
#define ROW_BLOCK    64
#define MIN_WIDE     (4 * TILE_ROWS + 1) /* rows from which on chunks are widened into the cache */
#define MIN_ITEMS    8                   /* per thread */
#define MIN_PARALLEL 4096                /* inputs that are prepared by several threads */
#define MAX_PRODUCTS 64                  /* that share the threads */

/* gcc has __builtin_shufflevector only since version 12, clang has no __builtin_shuffle. */
#ifdef __clang__
#define SHUFFLE_BYTES(x, ...) __builtin_shufflevector(x, x, __VA_ARGS__)
#else
#define SHUFFLE_BYTES(x, ...) __builtin_shuffle(x, (half_block){__VA_ARGS__})
#endif

struct product {
    const struct matrix *matrix;
    struct prepared_rows x;
    void *y;
    float *memory; /* of the prepared rows, or null */
    long rows, is_bf16;
    long first_item, items_per_block;
};

struct products {
    struct product product[MAX_PRODUCTS];
    long count, panels_per_item;
};

#define WIDE_CASE(rows)                                                                            \
    case rows: tile_wide(rows, x, wide, count, sums); break;

static long padded_inputs(const struct matrix *m) { return (m->k + BLOCK - 1) / BLOCK * BLOCK; }

static void add_wide(long rows, const float *x, const float *wide, long count,
                     vec sums[][PANEL_VECTORS]) {
    switch (rows) { EACH_TILE_SIZE(WIDE_CASE) }
}

#define FUNCTIONS(format) [format] = {widen_##format, multiply_##format}
static const struct format_functions functions[FORMAT_COUNT] = {
    FUNCTIONS(BF16), FUNCTIONS(INT8), FUNCTIONS(Q4_0), FUNCTIONS(Q4_1), FUNCTIONS(Q5_0),
    FUNCTIONS(Q5_1), FUNCTIONS(Q8_0), FUNCTIONS(Q4_K), FUNCTIONS(Q6_K), FUNCTIONS(MXFP4)};

/* ---- a panel ---- */

/* The sums of many rows, which are tiled. */
static void wide_sums(const struct prepared_rows *x, enum format format, const uint8_t *panel,
                      long k, long start, long rows, vec sums[][PANEL_VECTORS]) {
    float wide[CHUNK * PANEL] __attribute__((aligned(64)));
    clear(rows, sums);
    for (long from = 0; from < k; from += CHUNK) {
        long count = min_long(CHUNK, k - from);
        functions[format].widen(panel, from, count, wide);
        for (long r = 0; r < rows; r += TILE_ROWS)
            add_wide(min_long(TILE_ROWS, rows - r), x->wide + (start + r) * k + from * TILE_ROWS,
                     wide, count, sums + r);
    }
}

static void panel_sums(const struct product *p, const struct part *part, long panel_index,
                       long start, long rows, vec sums[][PANEL_VECTORS]) {
    long k = padded_inputs(p->matrix);
    const uint8_t *panel = part->packed + panel_index * panel_size(part->format, k);
    if (p->x.tiled) wide_sums(&p->x, part->format, panel, k, start, rows, sums);
    else
        for (long r = 0; r < rows; r += TILE_ROWS)
            functions[part->format].multiply(&p->x, start + r, min_long(TILE_ROWS, rows - r),
                                             panel, k, sums + r);
}

static void store_sums(const struct product *p, const struct part *part, long first_output,
                       long panel_index, long start, long rows, vec sums[][PANEL_VECTORS]) {
    const struct matrix *m = p->matrix;
    for (long r = 0; r < rows; r++)
        for (int v = 0; v < PANEL_VECTORS; v++) {
            long at = panel_index * PANEL + v * LANES, left = part->n - at;
            if (left <= 0) break;
            vec out = sums[r][v];
            if (part->scales) out *= load_f32(part->scales + at, left);
            if (m->bias) out += load_f32(m->bias + first_output + at, left);
            long to = (start + r) * m->n + first_output + at;
            if (p->is_bf16) store_bf16((bf16 *)p->y + to, out, left);
            else store_f32((float *)p->y + to, out, left);
        }
}

static long panel_count(const struct part *part) { return (part->n + PANEL - 1) / PANEL; }

static long row_blocks(const struct product *p) { return (p->rows + ROW_BLOCK - 1) / ROW_BLOCK; }

static long matrix_panels(const struct matrix *m) {
    long panels = 0;
    for (long i = 0; i < m->part_count; i++) panels += panel_count(m->parts + i);
    return panels;
}

/* A few panels for a block of rows. */
static void run_item(void *context, long item) {
    const struct products *all = context;
    const struct product *p = all->product + all->count - 1;
    while (item < p->first_item) p--;
    item -= p->first_item;
    long start = item / p->items_per_block * ROW_BLOCK,
         rows = min_long(ROW_BLOCK, p->rows - start);
    long first = item % p->items_per_block * all->panels_per_item;
    vec sums[ROW_BLOCK][PANEL_VECTORS];
    for (long panel = first; panel < first + all->panels_per_item; panel++) {
        const struct part *part = p->matrix->parts, *end = part + p->matrix->part_count;
        long index = panel, first_output = 0;
        while (part < end && index >= panel_count(part))
            index -= panel_count(part), first_output += part->n, part++;
        if (part == end) return;
        panel_sums(p, part, index, start, rows, sums);
        store_sums(p, part, first_output, index, start, rows, sums);
    }
}

static void run_products(struct products *all, int threads) {
    long work = 0, items = 0, size;
    for (long i = 0; i < all->count; i++)
        work += row_blocks(all->product + i) * matrix_panels(all->product[i].matrix);
    size = work / (MIN_ITEMS * threads);
    all->panels_per_item = size = size < 1 ? 1 : size;
    for (long i = 0; i < all->count; i++) {
        struct product *p = all->product + i;
        p->first_item = items;
        p->items_per_block = (matrix_panels(p->matrix) + size - 1) / size;
        items += row_blocks(p) * p->items_per_block;
    }
    parallel_for(items, threads, run_item, all);
}

/* ---- rows ---- */

/* 32 whole numbers as bytes, in the order of codes. */
static void order_codes(const int *numbers, int8_t *q) {
    typedef int8_t half_block __attribute__((vector_size(16)));
    int8_t plain[BLOCK];
    for (int i = 0; i < BLOCK; i++) plain[i] = numbers[i];
    for (int half = 0; half < BLOCK; half += 16) {
        half_block codes;
        memcpy(&codes, plain + half, sizeof codes);
        codes = SHUFFLE_BYTES(codes, 0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
        memcpy(q + half, &codes, sizeof codes);
    }
}

/* Quantize a row: q, in the order of codes, the steps of 32 inputs and the totals of 16. */
static void quantize_row(const float *x, int8_t *q, float *steps, float *totals, long k) {
    for (long at = 0; at < k; at += BLOCK) {
        vec part[BLOCK / LANES];
        ints top = {0}; /* Sizes are ordered as their bits are, and a NaN is above infinity. */
        for (int i = 0; i < BLOCK / LANES; i++) {
            part[i] = load_f32(x + at + i * LANES, k - at - i * LANES);
            ints size = (ints)part[i] & 0x7fffffff, larger = size > top;
            top = (larger & size) | (~larger & top);
        }
        int largest = 0;
        for (int l = 0; l < LANES; l++) largest = top[l] > largest ? top[l] : largest;
        float max_abs;
        memcpy(&max_abs, &largest, sizeof max_abs);
        float inverse_step = max_abs > 1e-30f ? 127 / max_abs : 0;
        /* A number that is not finite makes the row NaN. */
        float step = max_abs - max_abs == 0 ? max_abs / 127 : NAN;
        int numbers[BLOCK], sums[2] = {0};
        for (int i = 0; i < BLOCK / LANES; i++) { /* rounds to integers */
            ints whole = __builtin_convertvector(
                part[i] * inverse_step + 12582912.0f - 12582912.0f, ints);
            memcpy(numbers + i * LANES, &whole, sizeof whole);
        }
        for (int i = 0; i < 16; i++) sums[0] += numbers[i], sums[1] += numbers[16 + i];
        order_codes(numbers, q + at);
        steps[at / BLOCK] = step;
        totals[at / 16] = step * sums[0], totals[at / 16 + 1] = step * sums[1];
    }
}

static int has_only_bf16(const struct matrix *m) {
    for (long i = 0; i < m->part_count; i++)
        if (m->parts[i].format != BF16) return 0;
    return 1;
}

/* The sums of 16 inputs each. */
static void sum_row(const float *x, float *totals, long k) {
    for (long at = 0; at < k; at += 16) {
        float lanes[16];
        memcpy(lanes, x + at, sizeof lanes);
        for (int width = 8; width; width /= 2)
            for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
        totals[at / 16] = lanes[0];
    }
}

#define T       bf16
#define NAME(x) x##_bf16
#include "multiply.inc"
#undef T
#undef NAME

#define T       float
#define NAME(x) x##_f32
#include "multiply.inc"
