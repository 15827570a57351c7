/* A whole Llama-like layer in one call, in bf16: four matrix products and the operations between.
 */

#include "matrix.h"

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)

struct layer {
    struct matrix qkv, out, gate_up, down;
    const bf16 *mlp_norm, *q_norm, *k_norm; /* head norms may be null */
    long heads, kv_heads, head_dim, window;
    float eps, scale;
};

/* The rows of a pass, as peagle/kernels/row_pass.py describes; rope_table [rope_length, rot]. */
struct row_pass {
    const int64_t *positions, *kv_slots, *tree_masks; /* tree_masks: null for chains */
    const int32_t *page_tables, *row_starts, *row_counts, *first_positions;
    const float *rope_table;
    long bidirectional_rows, rows, batch, max_rows, page_size, pages, rot, rope_length;
    int threads;
};

void add_norm_bf16(const bf16 *, const bf16 *, const bf16 *, bf16 *, bf16 *, long, long, long, long,
                   long, long, float, int);
void rope_store_bf16(bf16 *, const int64_t *, const int64_t *, const float *, bf16 *, bf16 *,
                     const bf16 *, const bf16 *, long, long, long, long, long, long, long, float,
                     int);
void attend_bf16(const bf16 *, const bf16 *, const bf16 *, const int32_t *, const int32_t *,
                 const int32_t *, const int32_t *, const int64_t *, const int64_t *, bf16 *, long,
                 long, long, long, long, long, long, long, long, long, long, float, int);
void swiglu_bf16(const bf16 *, bf16 *, long, long, long, int);

/* normed [T, qkv.k] is the input of attention, residual [T, hidden] has a row stride -> x [T,
   hidden], the output of the MLP, and total [T, hidden], the residual stream to which it is still
   to be added. scratch has T (qkv.n + out.k + 2 hidden + gate_up.n + down.k) numbers. */
void layer(const struct layer *l, const struct row_pass *p, const bf16 *normed,
           const bf16 *residual, long residual_row, bf16 *keys, bf16 *values, bf16 *scratch,
           bf16 *x, bf16 *total) {
    long rows = p->rows, hidden = l->out.n, inner = l->down.k,
         attention_width = l->heads * l->head_dim;
    bf16 *qkv = scratch, *attended = qkv + rows * l->qkv.n,
         *projected = attended + rows * attention_width, *mlp_input = projected + rows * hidden;
    bf16 *gate_up = mlp_input + rows * hidden, *activated = gate_up + rows * l->gate_up.n;
    multiply(&l->qkv, normed, qkv, rows, l->qkv.k, p->threads);
    rope_store_bf16(qkv, p->positions, p->kv_slots, p->rope_table, keys, values, l->q_norm,
                    l->k_norm, rows, l->heads, l->kv_heads, l->head_dim, p->rot, p->rope_length,
                    l->qkv.n, l->eps, p->threads);
    memset(attended, 0, rows * attention_width * sizeof *attended); /* rows of no request */
    attend_bf16(qkv, keys, values, p->page_tables, p->row_starts, p->row_counts, p->first_positions,
                p->tree_masks, p->positions, attended, p->bidirectional_rows, p->batch, p->max_rows,
                l->heads, l->kv_heads, l->head_dim, p->page_size, p->pages, l->qkv.n,
                attention_width, l->window, l->scale, p->threads);
    multiply(&l->out, attended, projected, rows, attention_width, p->threads);
    add_norm_bf16(projected, residual, l->mlp_norm, mlp_input, total, rows, hidden, hidden,
                  residual_row, hidden, hidden, l->eps, p->threads);
    multiply(&l->gate_up, mlp_input, gate_up, rows, hidden, p->threads);
    swiglu_bf16(gate_up, activated, rows, inner, 2 * inner, p->threads);
    multiply(&l->down, activated, x, rows, inner, p->threads);
}
#endif
