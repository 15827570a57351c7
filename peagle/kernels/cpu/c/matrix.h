#pragma once
#include "common.h"

/* A weight [n, k], packed in panels as matrix.c describes. */
struct matrix {
    const void *packed;  /* bf16, or int8 if there are scales */
    const float *scales; /* [n] or null */
    const bf16 *bias;    /* [n] or null */
    long n, k;           /* k is even */
};

void multiply(const struct matrix *matrix, const bf16 *x, bf16 *y, long rows, long x_row,
              int threads);
