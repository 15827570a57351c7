/* What the kernels share: bf16, vectors of the CPU's width (GCC vector extensions), an exponential.

   A kernel computes every row on its own, in an order that depends only on the row's shape and
   position: its bits do not depend on its neighbors, on their number, or on the number of threads.
 */
#pragma once
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

/* float32 numbers in a vector register. Wider vectors than the registers would live in memory. */
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else /* NEON, SSE2 */
#define LANES 4
#endif

#define INLINE static inline __attribute__((always_inline))

typedef uint16_t bf16;
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t bits __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

static inline long min_long(long a, long b) { return a < b ? a : b; }

static inline long round_up(long x, long to) { return (x + to - 1) / to * to; }

static inline vec splat(float x) { return x - (vec){0}; }

static inline vec blend(ints where, vec yes, vec no) {
    return (vec)((where & (ints)yes) | (~where & (ints)no));
}

/* Load the first n of LANES numbers as float32; the others are zero. */
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

/* Widen LANES numbers of 16 bits (IEEE half precision), exactly. */
static inline vec load_f16(const uint16_t *p) {
#if defined(__AVX512F__)
    __m256i half;
    memcpy(&half, p, sizeof half);
    return (vec)_mm512_cvtph_ps(half);
#elif defined(__AVX2__) && defined(__F16C__)
    __m128i half;
    memcpy(&half, p, sizeof half);
    return (vec)_mm256_cvtph_ps(half);
#elif defined(__aarch64__)
    float16x4_t half;
    memcpy(&half, p, sizeof half);
    return (vec)vcvt_f32_f16(half);
#else
    halves half;
    memcpy(&half, p, sizeof half);
    bits wide = __builtin_convertvector(half, bits), size = wide & 0x7fff;
    ints small = (ints)(size < 0x0400), special = (ints)(size >= 0x7c00);
    vec normal = (vec)((size << 13) + (112 << 23) + ((bits)special & (112 << 23)));
    vec subnormal = __builtin_convertvector((ints)size, vec) * 0x1p-24f;
    return (vec)((bits)blend(small, subnormal, normal) | (wide & 0x8000) << 16);
#endif
}

/* a b + c, rounded once where the CPU can do that. The compiler may contract a plain expression in
   one place and not in another; this function is the same everywhere. */
static inline vec multiply_add(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
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
