/* The layout of packed weights, and their way into registers.

   Outputs are packed in panels of 2 or 3 vectors, one output per lane. A panel holds its inputs in
   order:

   BF16: [k / 2][PANEL] words of 32 bits, each of two consecutive inputs of one output; k is a
   multiple of 32, padded with zeros.

   All others: blocks of 32 inputs, in the bits of a GGUF file. W = scale * code + minimum.
     [PANEL] scales, [PANEL] minima (float16), for one block, or for 8 blocks in the K formats;
       MXFP4: [PANEL] exponents (8 bits)
     of each block:
       [PANEL] scales, [PANEL] minima or scales of the second half (8 bits), in the K formats
       [PANEL] words with the fifth bits, or 2 x [PANEL] with the fifth and sixth: those of byte i
         of word j are bit 8 i + j, or bits 8 i + 2 (j % 4) and the one above
       8 words of four codes, one per byte: as 4 x [PANEL] words of four-bit codes, of which word j
         has codes 2 j in the lower halves of its bytes and codes 2 j + 1 in the upper halves; or as
         8 x [PANEL] words of 8-bit codes

   CODE_INPUT tells which input a code belongs to: inputs of a pair lie 16 bits apart, so that a
   shift moves both to where numbers of 16 bits begin.

   These are the bytes of the file in another order (Q4_K: its 6-bit scales take 8 bits).

   MXFP4: a code is a float of 4 bits, and is read as a signed number, twice its value. */
#pragma once
#include "matrix.h"

#if LANES == 16 || defined(__aarch64__)
#define PANEL_VECTORS 3
#else /* half as many registers */
#define PANEL_VECTORS 2
#endif
#define PANEL         (LANES * PANEL_VECTORS)
#define BLOCK         32 /* inputs */
#define BLOCK_WORDS   8  /* words of 4 codes */

/* The input, of eight, of byte i of the first (odd = 0) or second word of a pair. */
#define CODE_INPUT(odd, i) ((odd) * 2 + (i) / 2 + (i) % 2 * 4)

typedef uint8_t bytes __attribute__((vector_size(LANES)));
typedef int8_t signed_bytes __attribute__((vector_size(LANES)));
typedef int8_t code_bytes __attribute__((vector_size(4 * LANES)));

/* Blocks that share a head; the bytes per output of the head and of a block. */
struct block_layout {
    int blocks, head, body;
};

INLINE struct block_layout block_layout(enum format format) {
    switch (format) {
    case Q4_0: return (struct block_layout){1, 2, 16};
    case Q4_1: return (struct block_layout){1, 4, 16};
    case Q5_0: return (struct block_layout){1, 2, 20};
    case Q5_1: return (struct block_layout){1, 4, 20};
    case Q8_0: return (struct block_layout){1, 2, 32};
    case Q4_K: return (struct block_layout){8, 4, 18};
    case Q6_K: return (struct block_layout){8, 2, 26};
    case MXFP4: return (struct block_layout){1, 1, 16};
    case BF16: return (struct block_layout){1, 0, 64};
    default: return (struct block_layout){1, 0, 32}; /* INT8 */
    }
}

/* Bytes of a panel with k inputs. */
static inline long panel_size(enum format format, long k) {
    struct block_layout layout = block_layout(format);
    long blocks = (k + BLOCK - 1) / BLOCK, heads = (blocks + layout.blocks - 1) / layout.blocks;
    return (heads * layout.head + blocks * layout.body) * PANEL;
}

struct block {
    const uint8_t *head, *body;
};

INLINE struct block block_at(const enum format format, const uint8_t *panel, long index) {
    struct block_layout layout = block_layout(format);
    const uint8_t *head =
        panel + index / layout.blocks * (layout.head + layout.blocks * layout.body) * PANEL;
    return (struct block){
        head, head + (layout.head + index % layout.blocks * layout.body) * PANEL};
}

/* Parts of a block with a scale of their own. */
#define HALVES(format) ((format) == Q6_K ? 2 : 1)

INLINE int has_eight_bits(const enum format format) { return format == Q8_0 || format == INT8; }

INLINE int has_signed_codes(const enum format format) {
    return has_eight_bits(format) || format == MXFP4;
}

/* Whether scales take 8 bits per block: the K formats. */
INLINE int has_small_scales(const enum format format) { return format == Q4_K || format == Q6_K; }

INLINE int has_four_bits(const enum format format) {
    return format == Q4_0 || format == Q4_1 || format == Q4_K || format == MXFP4;
}

/* Vectors in memory, at any address. */
typedef vec vec_at __attribute__((aligned(4), may_alias));
typedef bits bits_at __attribute__((aligned(4), may_alias));

INLINE bits load_word(const uint8_t *words, int vector) {
    return *(const bits_at *)(words + vector * sizeof(bits));
}

/* Both words of a pair, four bits of each byte from either. */
INLINE bits load_four_bits(const enum format format, const uint8_t *body, int vector, int pair) {
    int high_words = format == Q6_K ? 2 : format == Q5_0 || format == Q5_1;
    const uint8_t *low = body + (2 * has_small_scales(format) + high_words * 4) * PANEL;
    return load_word(low + pair * PANEL * 4, vector);
}

/* Bytes with codes of MXFP4 (sign, two bits of exponent, one of mantissa) -> twice their values.
   Baseline: 0 .. 4 stay what they are, 5 6 7 become 6 8 12. */
INLINE bits decode_mxfp4(bits codes) {
#define MXFP4_NUMBERS 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12
#if LANES == 16 && defined(__AVX512BW__)
    const __m512i table = _mm512_broadcast_i32x4(_mm_setr_epi8(MXFP4_NUMBERS));
    return (bits)_mm512_shuffle_epi8(table, (__m512i)codes);
#elif LANES == 8
    const __m256i table = _mm256_setr_epi8(MXFP4_NUMBERS, MXFP4_NUMBERS);
    return (bits)_mm256_shuffle_epi8(table, (__m256i)codes);
#elif defined(__aarch64__)
    const int8x16_t table = {MXFP4_NUMBERS};
    return (bits)vqtbl1q_s8(table, (uint8x16_t)codes);
#else
    code_bytes code = (code_bytes)codes, size = code & 7, sign = code > 7;
    size -= (size > 4) + (size > 5) + 3 * (size > 6);
    return (bits)((size ^ sign) - sign);
#endif
}

/* One vector of the first or second word of a pair of words. */
INLINE bits load_codes(const enum format format, const uint8_t *body, int vector, int pair,
                       const int odd) {
    if (has_eight_bits(format)) return load_word(body + (pair * 2 + odd) * PANEL * 4, vector);
    const uint8_t *high = body + 2 * has_small_scales(format) * PANEL;
    bits codes = load_four_bits(format, body, vector, pair) >> odd * 4 & 0x0f0f0f0f;
    if (format == MXFP4) return decode_mxfp4(codes);
    if (format == Q5_0 || format == Q5_1)
        codes |= (load_word(high, vector) >> (pair * 2 + odd) & 0x01010101) << 4;
    if (format == Q6_K) {
        bits fifth_and_sixth = load_word(high + pair / 2 * PANEL * 4, vector);
        codes |= (fifth_and_sixth >> (pair % 2 * 4 + odd * 2) & 0x03030303) << 4;
    }
    return codes;
}

INLINE vec load_u8(const uint8_t *p) {
    bytes out;
    memcpy(&out, p, sizeof out);
    return __builtin_convertvector(out, vec);
}

INLINE vec load_i8(const uint8_t *p) {
    signed_bytes out;
    memcpy(&out, p, sizeof out);
    return __builtin_convertvector(out, vec);
}

/* Half of 2^(exponent - 127), for codes that are twice their values; exponent 0 is subnormal. */
INLINE vec load_exponents(const uint8_t *p) {
    bytes exponents;
    memcpy(&exponents, p, sizeof exponents);
    bits power = __builtin_convertvector(exponents, bits) << 23;
    return (vec)(power | ((bits)(power == 0) & 0x00400000)) * 0.5f;
}

/* One vector of code `byte` of four, as float32. */
INLINE vec widen_code(const enum format format, bits codes, const int byte) {
    ints code = has_signed_codes(format) ? (ints)(codes << (24 - 8 * byte)) >> 24
                                         : (ints)(codes >> 8 * byte & 0xff);
    return __builtin_convertvector(code, vec);
}

/* The scales and minima of half a block. The products are exact in float32, so W has one rounding,
   as the dequantized weight of the file has. */
INLINE void unpack_scales(const enum format format, struct block block, int half,
                          vec scale[PANEL_VECTORS], vec minimum[PANEL_VECTORS]) {
    for (int v = 0; v < PANEL_VECTORS; v++) {
        long at = v * LANES;
        if (format == BF16 || format == INT8) {
            scale[v] = splat(1), minimum[v] = splat(0);
            continue;
        }
        if (format == MXFP4) {
            scale[v] = load_exponents(block.head + at), minimum[v] = splat(0);
            continue;
        }
        vec first = load_f16((const uint16_t *)block.head + at);
        const uint16_t *second = (const uint16_t *)block.head + PANEL + at;
        switch (format) {
        case Q4_0: scale[v] = first, minimum[v] = first * -8.0f; break;
        case Q5_0: scale[v] = first, minimum[v] = first * -16.0f; break;
        case Q4_1:
        case Q5_1: scale[v] = first, minimum[v] = load_f16(second); break;
        case Q4_K:
            scale[v] = first * load_u8(block.body + at);
            minimum[v] = -(load_f16(second) * load_u8(block.body + PANEL + at));
            break;
        case Q6_K:
            scale[v] = first * load_i8(block.body + half * PANEL + at);
            minimum[v] = scale[v] * -32.0f;
            break;
        default: scale[v] = first, minimum[v] = splat(0); /* Q8_0 */
        }
    }
}
