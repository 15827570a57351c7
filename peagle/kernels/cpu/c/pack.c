/* Packing a weight as block_format.h describes. */

#include "block_format.h"
#include "pool.h"

/* 32 inputs of one output. */
struct plain_block {
    uint8_t codes[BLOCK];
    uint16_t head[2]; /* float16: scale and minimum */
    uint8_t sub[2];   /* of K formats: scale and minimum, or the scales of both halves;
                         of MXFP4: the exponent of the scale */
};

long packed_size(long format, long n, long k) {
    return (n + PANEL - 1) / PANEL * panel_size(format, k);
}

static void read_nibbles(const uint8_t *from, uint8_t *codes) {
    for (int i = 0; i < 16; i++) codes[i] = from[i] & 15, codes[16 + i] = from[i] >> 4;
}

static void read_fifth_bits(const uint8_t *from, uint8_t *codes) {
    for (int i = 0; i < BLOCK; i++) codes[i] |= (from[i / 8] >> i % 8 & 1) << 4;
}

/* from: 256 inputs; `index`: which 32 of them. */
static void read_q4_k(const uint8_t *from, int index, struct plain_block *block) {
    const uint8_t *scales = from + 4, *codes = from + 16 + index / 2 * 32;
    memcpy(block->head, from, 4);
    if (index < 4)
        block->sub[0] = scales[index] & 63, block->sub[1] = scales[index + 4] & 63;
    else {
        block->sub[0] = (scales[index + 4] & 15) | scales[index - 4] >> 6 << 4;
        block->sub[1] = scales[index + 4] >> 4 | scales[index] >> 6 << 4;
    }
    for (int i = 0; i < BLOCK; i++) block->codes[i] = codes[i] >> index % 2 * 4 & 15;
}

static void read_q6_k(const uint8_t *from, int index, struct plain_block *block) {
    int half = index / 4, quarter = index % 4; /* of 256 and of 128 inputs */
    const uint8_t *low = from + half * 64 + quarter % 2 * 32, *high = from + 128 + half * 32;
    memcpy(block->sub, from + 192 + index * 2, 2);
    memcpy(block->head, from + 208, 2);
    for (int i = 0; i < BLOCK; i++)
        block->codes[i] = (low[i] >> quarter / 2 * 4 & 15) | (high[i] >> quarter * 2 & 3) << 4;
}

/* row: the numbers or blocks of one output, k inputs. */
static void read_block(enum format format, const uint8_t *row, long k, long index,
                       struct plain_block *block) {
    memset(block, 0, sizeof *block);
    switch (format) {
    case Q4_0: case Q5_0: {
        const uint8_t *from = row + index * (format == Q4_0 ? 18 : 22);
        memcpy(block->head, from, 2);
        read_nibbles(from + (format == Q4_0 ? 2 : 6), block->codes);
        if (format == Q5_0) read_fifth_bits(from + 2, block->codes);
        break;
    }
    case Q4_1: case Q5_1: {
        const uint8_t *from = row + index * (format == Q4_1 ? 20 : 24);
        memcpy(block->head, from, 4);
        read_nibbles(from + (format == Q4_1 ? 4 : 8), block->codes);
        if (format == Q5_1) read_fifth_bits(from + 4, block->codes);
        break;
    }
    case Q8_0:
        memcpy(block->head, row + index * 34, 2);
        memcpy(block->codes, row + index * 34 + 2, BLOCK);
        break;
    case MXFP4: { /* the exponent, and pairs of inputs, the first in the lower bits */
        const uint8_t *from = row + index * 17;
        block->sub[0] = from[0];
        for (int i = 0; i < BLOCK; i++) block->codes[i] = from[1 + i / 2] >> i % 2 * 4 & 15;
        break;
    }
    case Q4_K: read_q4_k(row + index / 8 * 144, index % 8, block); break;
    case Q6_K: read_q6_k(row + index / 8 * 210, index % 8, block); break;
    default: memcpy(block->codes, row + index * BLOCK, min_long(BLOCK, k - index * BLOCK));
    }
}

/* Write the block of the output in lane `lane` of a panel. */
static void write_block(enum format format, const struct plain_block *block, uint8_t *panel,
                        long index, long lane) {
    struct block_layout layout = block_layout(format);
    struct block at = block_at(format, panel, index);
    uint8_t *head = (uint8_t *)at.head, *body = (uint8_t *)at.body;
    for (int i = 0; i < layout.head / 2; i++)
        memcpy(head + (i * PANEL + lane) * 2, &block->head[i], 2);
    if (format == MXFP4) head[lane] = block->sub[0];
    if (has_small_scales(format))
        for (int i = 0; i < 2; i++, body += PANEL) body[lane] = block->sub[i];
    int high_bits = format == Q6_K ? 2 : format == Q5_0 || format == Q5_1;
    uint32_t high[2] = {0}, words[BLOCK_WORDS] = {0};
    for (int i = 0; i < BLOCK; i++) {
        int j = i / 4, byte = i % 4 * 8;
        uint32_t code = block->codes[j / 2 * 8 + CODE_INPUT(j % 2, i % 4)];
        if (has_eight_bits(format)) words[j] |= code << byte;
        else words[j / 2] |= (code & 15) << (byte + j % 2 * 4);
        if (high_bits == 1) high[0] |= code >> 4 << (byte + j);
        if (high_bits == 2) high[j / 4] |= code >> 4 << (byte + j % 4 * 2);
    }
    for (int i = 0; i < high_bits; i++, body += PANEL * 4) memcpy(body + lane * 4, &high[i], 4);
    for (int i = 0; i < (has_eight_bits(format) ? 8 : 4); i++, body += PANEL * 4)
        memcpy(body + lane * 4, &words[i], 4);
}

struct packing {
    long format, n, k, row_size;
    const uint8_t *weight;
    uint8_t *packed;
};

static void pack_panel(void *context, long index) {
    const struct packing *p = context;
    uint8_t *panel = p->packed + index * panel_size(p->format, p->k);
    memset(panel, 0, panel_size(p->format, p->k));
    for (long lane = 0; lane < PANEL && index * PANEL + lane < p->n; lane++) {
        const uint8_t *row = p->weight + (index * PANEL + lane) * p->row_size;
        if (p->format == BF16)
            for (long i = 0; i < p->k; i++)
                memcpy(panel + (i / 2 * PANEL + lane) * 4 + i % 2 * 2, row + i * 2, 2);
        else
            for (long i = 0; i < (p->k + BLOCK - 1) / BLOCK; i++) {
                struct plain_block block;
                read_block(p->format, row, p->k, i, &block);
                write_block(p->format, &block, panel, i, lane);
            }
    }
}

/* weight [n][row_size bytes] -> packed, as `packed_size` tells; outputs behind n are zero. */
void pack(long format, const uint8_t *weight, uint8_t *packed, long n, long k, long row_size,
          int threads) {
    struct packing packing = {format, n, k, row_size, weight, packed};
    parallel_for((n + PANEL - 1) / PANEL, threads, pack_panel, &packing);
}
