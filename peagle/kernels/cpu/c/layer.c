/* A whole Llama-like layer in one call, in bf16: four products and what lies between them. */

#include "matrix.h"

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)

struct layer {
    struct matrix qkv, out, gate_up, down;
    const bf16 *after, *q_norm, *k_norm; /* the norm before the MLP; those of heads, or null */
    long heads, kv_heads, d, window;
    float eps, scale;
};

/* Rows of several requests: see engine/rowpass.py. table: [length, rot] of rotary angles. */
struct pass {
    const int64_t *positions, *slots, *masks; /* masks: null but for trees */
    const int32_t *tables, *starts, *counts, *first;
    const float *table;
    long both, rows, batch, most, page, pages, rot, length;
    int threads;
};

void add_norm_bf16(const bf16 *, const bf16 *, const bf16 *, bf16 *, bf16 *, long, long, long, long, long, long, float,
                   int);
void rope_store_bf16(bf16 *, const int64_t *, const int64_t *, const float *, bf16 *, bf16 *, const bf16 *,
                     const bf16 *, long, long, long, long, long, long, long, float, int);
void attend_bf16(const bf16 *, const bf16 *, const bf16 *, const int32_t *, const int32_t *, const int32_t *,
                 const int32_t *, const int64_t *, const int64_t *, bf16 *, long, long, long, long, long, long, long,
                 long, long, long, long, float, int);
void swiglu_bf16(const bf16 *, bf16 *, long, long, long, int);

/* normed [T, qkv.k] attention's input, residual [T, hidden], rows so far apart -> x [T, hidden] the MLP's output, total [T, hidden] the
   residual stream before it is added. scratch: room for T (qkv.n + out.k + 2 hidden + gate_up.n + down.k). */
void layer(const struct layer *l, const struct pass *p, const bf16 *normed, const bf16 *residual, long residual_row,
           bf16 *keys, bf16 *values, bf16 *scratch, bf16 *x, bf16 *total) {
    long rows = p->rows, hidden = l->out.n, inner = l->down.k, wide = l->heads * l->d;
    bf16 *qkv = scratch, *seen = qkv + rows * l->qkv.n, *between = seen + rows * wide, *after = between + rows * hidden;
    bf16 *gate_up = after + rows * hidden, *opened = gate_up + rows * l->gate_up.n;
    multiply(&l->qkv, normed, qkv, rows, l->qkv.k, p->threads);
    rope_store_bf16(qkv, p->positions, p->slots, p->table, keys, values, l->q_norm, l->k_norm, rows, l->heads,
                    l->kv_heads, l->d, p->rot, p->length, l->qkv.n, l->eps, p->threads);
    memset(seen, 0, rows * wide * sizeof *seen); /* rows of nobody */
    attend_bf16(qkv, keys, values, p->tables, p->starts, p->counts, p->first, p->masks, p->positions, seen,
                p->both, p->batch, p->most, l->heads, l->kv_heads, l->d, p->page, p->pages, l->qkv.n, wide, l->window,
                l->scale, p->threads);
    multiply(&l->out, seen, between, rows, wide, p->threads);
    add_norm_bf16(between, residual, l->after, after, total, rows, hidden, hidden, residual_row, hidden, hidden,
                  l->eps, p->threads);
    multiply(&l->gate_up, after, gate_up, rows, hidden, p->threads);
    swiglu_bf16(gate_up, opened, rows, inner, 2 * inner, p->threads);
    multiply(&l->down, opened, x, rows, inner, p->threads);
}
#endif
