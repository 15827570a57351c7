/* What depends on the instruction set: the number of rows in a tile, and dot products of pairs of
   bf16 and of words of four bytes. */
#pragma once
#include "block_format.h"

/* A tile has a sum in a register for each row and vector of a panel. */
#if LANES == 16 || defined(__aarch64__) /* 32 registers */
#define TILE_ROWS           8
#define EACH_TILE_SIZE(one) one(1) one(2) one(3) one(4) one(5) one(6) one(7) one(8)
#else
#define TILE_ROWS           4
#define EACH_TILE_SIZE(one) one(1) one(2) one(3) one(4)
#endif

/* Rows of a tile of codes, which has a sum of the block beside each sum. */
#define CODE_ROWS           4
#define EACH_CODE_SIZE(one) one(1) one(2) one(3) one(4)

/* ---- four-bit codes as numbers, by their lowest bits in a word ---- */

#if LANES == 16
#define WIDENS_BY_LOOKUP 1
INLINE vec look_up(const enum format format, bits word) {
    const vec table = format == MXFP4
                          ? (vec){MXFP4_NUMBERS}
                          : (vec){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return (vec)_mm512_permutexvar_ps((__m512i)word, (__m512)table);
}
#else
#define WIDENS_BY_LOOKUP 0
INLINE vec look_up(const enum format format, bits word) {
    (void)format;
    return __builtin_convertvector((ints)(word & 15), vec);
}
#endif

/* ---- pairs of bf16: an extension of AVX-512 and of ARMv8.6 ---- */

#if defined(__AVX512BF16__) && LANES == 16
#define HAS_PAIR_DOT
INLINE vec dot_pair(vec sum, int32_t x, bits weight) {
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(x), (__m512bh)weight);
}
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define HAS_PAIR_DOT
INLINE vec dot_pair(vec sum, int32_t x, bits weight) {
    return (vec)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)weight,
                            (bfloat16x8_t)vdupq_n_s32(x));
}
#endif

#ifdef HAS_PAIR_DOT
/* The codes of inputs 2 i and 2 i + 1 of a pair of words, as bf16. */
INLINE bits widen_pair(const enum format format, const uint8_t *body, int vector, int pair,
                       const int i) {
#if LANES == 16
    if (has_four_bits(format)) {
        __m512i index =
            _mm512_srli_epi16((__m512i)load_four_bits(format, body, vector, pair), i * 4);
        /* 0 .. 15 or MXFP4_NUMBERS in bf16, twice: the lookup takes five bits, of which the fifth is
           another code's */
        const __m256i half =
            format == MXFP4
                ? _mm256_setr_epi16(0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40c0, 0x4100, 0x4140, 0,
                                    0xbf80, 0xc000, 0xc040, 0xc080, 0xc0c0, 0xc100, 0xc140)
                : _mm256_setr_epi16(0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                                    0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160,
                                    0x4170);
        return (bits)_mm512_permutexvar_epi16(index, _mm512_broadcast_i64x4(half));
    }
#endif
    bits codes = load_codes(format, body, vector, pair, i % 2);
    return (bits)widen_code(format, codes, i / 2) >> 16 |
           ((bits)widen_code(format, codes, i / 2 + 2) & 0xffff0000);
}
#endif

/* ---- words of four bytes ---- */

#if defined(__AVX512VNNI__) && LANES == 16
#define HAS_INT8_DOT
#define TAKES_UNSIGNED 1 /* vpdpbusd */
/* gcc 12 moves every sum to memory and back for the intrinsic, whose operands have 64-bit lanes. */
INLINE ints dot_word(ints sum, bits codes, int32_t x) {
    ints word = x - (ints){0};
    __asm__("vpdpbusd %1, %2, %0" : "+v"(sum) : "v"(word), "v"(codes));
    return sum;
}
#elif defined(__ARM_FEATURE_DOTPROD)
#define HAS_INT8_DOT
#define TAKES_UNSIGNED 0
INLINE ints dot_word(ints sum, bits codes, int32_t x) {
    return (ints)vdotq_s32((int32x4_t)sum, (int8x16_t)codes, (int8x16_t)vdupq_n_s32(x));
}
#elif !defined(__AVX2__)
#define HAS_INT8_DOT
#define TAKES_UNSIGNED 0
INLINE ints dot_word(ints sum, bits codes, int32_t x) {
    for (int i = 0; i < 4; i++)
        sum += ((ints)(codes << (24 - 8 * i)) >> 24) * (int32_t)(int8_t)(x >> 8 * i);
    return sum;
}
#else
#define TAKES_UNSIGNED 0
#endif

/* What is added to signed codes where the dot product takes unsigned ones. Those of MXFP4 are small:
   a larger number would cost accuracy. */
INLINE int signed_shift(const enum format format) {
    return !TAKES_UNSIGNED || !has_signed_codes(format) ? 0 : format == MXFP4 ? 16 : 128;
}

/* Codes as the dot product takes them. */
INLINE bits dot_operand(const enum format format, const uint8_t *body, int vector, int pair,
                        const int odd) {
    bits codes = load_codes(format, body, vector, pair, odd);
    const int shift = signed_shift(format);
    return shift == 128 ? codes ^ 0x80808080 : (bits)((code_bytes)codes + (int8_t)shift);
}

#ifdef HAS_INT8_DOT
/* dot[r] = the products of `pairs` pairs of words of a block with x, rows with a stride. */
INLINE void dot_words(const enum format format, const int rows, const int first, const int pairs,
                      const uint8_t *body, const int32_t *x, long row,
                      ints dot[][PANEL_VECTORS]) {
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < PANEL_VECTORS; v++) dot[r][v] = (ints){0};
    for (int pair = first; pair < first + pairs; pair++)
        for (int v = 0; v < PANEL_VECTORS; v++)
            for (int odd = 0; odd < 2; odd++) {
                bits codes = dot_operand(format, body, v, pair, odd);
                for (int r = 0; r < rows; r++)
                    dot[r][v] = dot_word(dot[r][v], codes, x[r * row + pair * 2 + odd]);
            }
}
#else
/* AVX2, and AVX-512 without VNNI: products of bytes are added in pairs, to 16 bits. */
typedef int16_t shorts __attribute__((vector_size(4 * LANES)));

INLINE shorts dot_byte_pairs(const int is_signed, bits codes, int32_t x) {
#if LANES == 16
    __m512i word = _mm512_set1_epi32(x), code = (__m512i)codes;
    if (is_signed) {
        word = _mm512_mask_sub_epi8(word, _mm512_movepi8_mask(code), _mm512_setzero_si512(), word);
        code = _mm512_abs_epi8(code);
    }
    return (shorts)_mm512_maddubs_epi16(code, word);
#else
    __m256i word = _mm256_set1_epi32(x), code = (__m256i)codes;
    if (is_signed) {
        word = _mm256_sign_epi8(word, code);
        code = _mm256_abs_epi8(code);
    }
    return (shorts)_mm256_maddubs_epi16(code, word);
#endif
}

INLINE ints add_pairs(shorts x) {
#if LANES == 16
    return (ints)_mm512_madd_epi16((__m512i)x, _mm512_set1_epi16(1));
#else
    return (ints)_mm256_madd_epi16((__m256i)x, _mm256_set1_epi16(1));
#endif
}

INLINE void dot_words(const enum format format, const int rows, const int first, const int pairs,
                      const uint8_t *body, const int32_t *x, long row,
                      ints dot[][PANEL_VECTORS]) {
    /* 16 bits hold the products of a block of four-bit codes (16 x 15 x 127), of a pair of words of
       six-bit codes (4 x 63 x 127), or of one word of signed codes of eight bits. */
    const int is_signed = has_signed_codes(format), is_small = has_four_bits(format);
    shorts sum[CODE_ROWS][PANEL_VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < PANEL_VECTORS; v++) sum[r][v] = (shorts){0}, dot[r][v] = (ints){0};
    for (int pair = first; pair < first + pairs; pair++)
        for (int v = 0; v < PANEL_VECTORS; v++) {
            bits even = dot_operand(format, body, v, pair, 0),
                 odd = dot_operand(format, body, v, pair, 1);
            for (int r = 0; r < rows; r++) {
                const int32_t *words = x + r * row + pair * 2;
                shorts one = dot_byte_pairs(is_signed, even, words[0]),
                       other = dot_byte_pairs(is_signed, odd, words[1]);
                if (is_small) sum[r][v] += one + other;
                else if (is_signed) dot[r][v] += add_pairs(one) + add_pairs(other);
                else dot[r][v] += add_pairs(one + other);
            }
        }
    for (int r = 0; is_small && r < rows; r++)
        for (int v = 0; v < PANEL_VECTORS; v++) dot[r][v] = add_pairs(sum[r][v]);
}
#endif
