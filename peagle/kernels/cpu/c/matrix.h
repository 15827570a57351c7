/* A weight [n, k] for `multiply`, packed as block_format.h describes. */
#pragma once
#include "common.h"

enum format { BF16, INT8, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q6_K, MXFP4, FORMAT_COUNT };

/* Consecutive outputs with the same format. */
struct part {
    const uint8_t *packed;
    const float *scales; /* [n], of INT8 and of fp8 in BF16; else null */
    long format, n;
};

struct matrix {
    const struct part *parts;
    const float *bias; /* [n] or null */
    long part_count, n, k;
    long int8_rows; /* whether rows are quantized to int8, which is faster but not exact */
};

/* Rows x [rows, k], with a stride, for one matrix -> y [rows, n]. */
struct row_group {
    const struct matrix *matrix;
    const void *x;
    void *y;
    long rows, x_row;
};

/* The products of several groups at once: the threads share the panels of all of them. */
void multiply_groups_bf16(const struct row_group *groups, long count, int threads);
void multiply_groups_f32(const struct row_group *groups, long count, int threads);

/* x [T, k] with a row stride -> y [T, n]. */
void multiply_bf16(const struct matrix *matrix, const bf16 *x, bf16 *y, long rows, long x_row,
                   int threads);
void multiply_f32(const struct matrix *matrix, const float *x, float *y, long rows, long x_row,
                  int threads);
