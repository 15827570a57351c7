/* The experts of a layer, and the router that chooses among them. */
#pragma once
#include "matrix.h"

#define MAX_EXPERTS 1024

/* Gated MLPs. The outputs of gate_up are all gates, then all ups:
   gate * sigmoid(alpha * gate) * (up + up_shift), with gate <= limit and -limit <= up <= limit. */
struct experts {
    const struct matrix *gate_up, *down; /* [count] each */
    long count;
    float alpha, limit, up_shift; /* limit: infinity if there is none */
};

/* A row's experts are those with the top_k largest logits, the first of equal ones. Their weights
   are a softmax over all experts, or over the chosen ones. Each call writes its counts. */
struct moe {
    struct matrix router;
    const struct experts *experts;
    long top_k, normalized; /* normalized: whether the weights of a row add up to 1 */
    int32_t *counts; /* null, or [experts + 1]: rows of each expert, then experts with rows */
};

/* x [rows, hidden] -> out [rows, hidden], which must not overlap. */
void moe_bf16(const struct moe *moe, const bf16 *x, long x_row, bf16 *out, long rows, int threads);
void moe_f32(const struct moe *moe, const float *x, long x_row, float *out, long rows,
             int threads);
