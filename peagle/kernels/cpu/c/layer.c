/* A whole Llama-like layer, or a stack of them, in one call: four matrix products and the operations
   between. A mixture of experts may take the place of the MLP. */

#include "experts.h"
#include "matrix.h"

struct layer {
    struct matrix qkv, out, gate_up, down;
    const struct moe *moe; /* if there are no gate_up and down, else null */
    const void *input_norm, *mlp_norm, *q_norm, *k_norm; /* head norms may be null */
    const float *sinks;                                  /* [heads] or null */
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

/* Where the residual stream that enters a layer is copied to: columns of a matrix of taps. */
struct taps {
    const int64_t *layers; /* [count], in the order of the columns */
    long count;
};

#define T       bf16
#define NAME(x) x##_bf16
#include "layer.inc"
#undef T
#undef NAME

#define T       float
#define NAME(x) x##_f32
#include "layer.inc"
