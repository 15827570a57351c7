/* The tiles of one format, for each number of rows. Compiled once per format, with -DFORMAT=Q4_1 for
   example, so that the compilers run in parallel. */

#include "tiles.h"

#define JOIN(a, b)       a##b
#define FUNCTION(a, b)   JOIN(a, b)

#define BLOCKS_CASE(rows)                                                                          \
    case rows: tile_blocks(FORMAT, rows, x->wide + start * x->row, x->row, panel, k, sums); break;
#define PAIRS_CASE(rows)                                                                           \
    case rows: tile_pairs(rows, x->pairs + start * x->row, x->row, panel, k / 2, sums); break;
#define CODES_CASE(rows)                                                                           \
    case rows:                                                                                     \
        if (x->q) tile_codes(FORMAT, rows, 1, x, start + r, panel, k, sums + r);                   \
        else tile_codes(FORMAT, rows, 0, x, start + r, panel, k, sums + r);                        \
        break;

void FUNCTION(widen_, FORMAT)(const uint8_t *panel, long from, long count, float *wide) {
    for (long i = 0; i < count; i += BLOCK)
        widen_block(FORMAT, block_at(FORMAT, panel, (from + i) / BLOCK), wide + i * PANEL);
}

void FUNCTION(multiply_, FORMAT)(const struct prepared_rows *x, long start, long rows,
                                 const uint8_t *panel, long k, vec sums[][PANEL_VECTORS]) {
    if (FORMAT != BF16 && !x->wide) {
        for (long r = 0; r < rows; r += CODE_ROWS)
            switch (min_long(CODE_ROWS, rows - r)) { EACH_CODE_SIZE(CODES_CASE) }
        return;
    }
#ifdef HAS_PAIR_DOT
    if (FORMAT == BF16 && x->pairs) {
        switch (rows) { EACH_TILE_SIZE(PAIRS_CASE) }
        return;
    }
#endif
    switch (rows) { EACH_TILE_SIZE(BLOCKS_CASE) }
}
