/* What the kernels share: bf16, vectors of 16 floats (GCC vector extensions), an exponential.

   A kernel computes every row on its own, in an order that depends only on the row's shape and
   position: its bits do not depend on its neighbors, on their number, or on the number of threads.
 */
#pragma once
#include <stdint.h>
#include <string.h>

#define LANES 16

typedef uint16_t bf16;
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t bits __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

static inline long min_long(long a, long b) { return a < b ? a : b; }

static inline vec splat(float x) { return x - (vec){0}; }

static inline vec blend(ints where, vec yes, vec no) {
    return (vec)((where & (ints)yes) | (~where & (ints)no));
}

/* Load the first n of 16 numbers as float32; the others are zero. */
static inline vec load_f32(const float *p, long n) {
    vec out = {0};
    if (n >= LANES) memcpy(&out, p, sizeof out);
    else if (n > 0) memcpy(&out, p, n * sizeof *p);
    return out;
}

static inline vec load_bf16(const bf16 *p, long n) {
    halves half = {0};
    if (n >= LANES) memcpy(&half, p, sizeof half);
    else if (n > 0) memcpy(&half, p, n * sizeof *p);
    return (vec)(__builtin_convertvector(half, bits) << 16);
}

static inline void store_f32(float *p, vec x, long n) {
    if (n >= LANES) memcpy(p, &x, sizeof x);
    else if (n > 0) memcpy(p, &x, n * sizeof *p);
}

/* Round to the nearest bf16, ties to even; a NaN stays a NaN. */
static inline halves narrow(vec x) {
    bits b = (bits)x, rounded = (b + 0x7fff + ((b >> 16) & 1)) >> 16;
    bits nan = (bits)(x != x);
    return __builtin_convertvector((nan & 0x7fc0) | (~nan & rounded), halves);
}

static inline void store_bf16(bf16 *p, vec x, long n) {
    halves half = narrow(x);
    if (n >= LANES) memcpy(p, &half, sizeof half);
    else if (n > 0) memcpy(p, &half, n * sizeof *p);
}

static inline vec round_f32(vec x) { return x; }

static inline vec round_bf16(vec x) {
    return (vec)(__builtin_convertvector(narrow(x), bits) << 16);
}

static inline float sum_lanes(vec x) {
    float lanes[LANES];
    memcpy(lanes, &x, sizeof x);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    return lanes[0];
}

/* e^x within two roundings: 2^n times a polynomial of the remainder. x is clamped to -87 .. 88. */
static inline vec exp_lanes(vec x) {
    x = blend(x < splat(-87.0f), splat(-87.0f), x);
    x = blend(x > splat(88.0f), splat(88.0f), x);
    vec n = x * 1.44269504f + 12582912.0f - 12582912.0f; /* rounds to an integer */
    vec r = x - n * 0.693145752f;
    r = r - n * 1.42860677e-6f;
    vec p = splat(1.0f / 5040);
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return p * (vec)((__builtin_convertvector(n, ints) + 127) << 23);
}
