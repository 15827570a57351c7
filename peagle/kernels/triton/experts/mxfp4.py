"""Products of rows with MXFP4 matrices: decoded in registers, multiplied by tensor cores.

`multiply_codes` reads a matrix as published, in any dtype, and runs in Triton's interpreter.
`multiply_tiles` reads the tiles of mxfp4_tiles.py, on a GPU and in bf16. Few rows leave a tensor
core idle: the instructions that decode are the limit, so they are as few as possible.
"""

try:
    import triton
    import triton.language as tl
except ImportError:  # without Triton the references run
    triton = None

from peagle.kernels.mxfp4_tiles import TILE_BYTES, TILE_INPUTS, TILE_ROWS

# Four bytes ($4) of a tile, the scale of their low codes ($5) and of their high codes ($9), both as
# two equal bf16 numbers, to the weights of the low codes ($0, $1) and of the high ones ($2, $3).
# Sign, exponent and mantissa of a code move to their places in a bf16 number, which is then 2**126
# times too small; the scale makes up for that.
DECODE_TILE = """
{
    .reg .b32 sign, bits, zero;
    mov.b32 zero, 0x80008000;
    and.b32 bits, $4, 0x81C081C0;
    fma.rn.bf16x2 $0, bits, $5, zero;
    shl.b32 bits, $4, 3;
    and.b32 bits, bits, 0x81C081C0;
    fma.rn.bf16x2 $1, bits, $5, zero;
    shl.b32 sign, $4, 2;
    shl.b32 bits, $4, 6;
    and.b32 bits, bits, 0x01C001C0;
    lop3.b32 bits, sign, 0x80008000, bits, 0xEA;
    fma.rn.bf16x2 $2, bits, $9, zero;
    shl.b32 sign, $4, 1;
    shr.b32 bits, $4, 3;
    and.b32 bits, bits, 0x01C001C0;
    lop3.b32 bits, sign, 0x80008000, bits, 0xEA;
    fma.rn.bf16x2 $3, bits, $9, zero;
}
"""


if triton is not None:
    _DECODE_TILE = tl.constexpr(DECODE_TILE)
    _TILE_ROWS = tl.constexpr(TILE_ROWS)
    _TILE_BYTES = tl.constexpr(TILE_BYTES)
    _TILE_INPUTS = tl.constexpr(TILE_INPUTS)

    @triton.jit
    def _code_value(code):  # type: ignore[no-untyped-def]
        """The value of a code in float32; bits 0-3 of an int32."""
        magnitude = code & 7
        bits = (((magnitude >> 1) + 126) << 23) | ((magnitude & 1) << 22)
        normal = bits.to(tl.float32, bitcast=True)
        value = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, normal)
        return tl.where((code & 8) == 8, -value, value)

    @triton.jit
    def _spread(scales, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
        """scales [N, G] -> [N, WIDTH], each for as many neighbors"""
        rows: tl.constexpr = scales.shape[0]
        groups: tl.constexpr = scales.shape[1]
        spread = tl.broadcast_to(scales[:, :, None], (rows, groups, WIDTH // groups))
        return tl.reshape(spread, (rows, WIDTH))

    @triton.jit
    def multiply_codes(  # type: ignore[no-untyped-def]
        x_ptr,
        row,
        row_mask,
        stride_x_row,
        weight_ptr,
        scales_ptr,
        n,
        n_mask,
        first_block,
        end_block,
        WIDTH: tl.constexpr,
        BLOCK_K: tl.constexpr,
    ):
        """[N, rows]: the products of rows of x with the rows n of a matrix, over some inputs.

        WIDTH and BLOCK_K count bytes. The codes in the low halves of bytes are multiplied with the
        even inputs, those in the high halves with the odd ones.
        """
        dtype: tl.constexpr = x_ptr.dtype.element_ty
        rows: tl.constexpr = row.shape[0]
        SCALE_WIDTH: tl.constexpr = WIDTH // 16
        total = tl.zeros([n.shape[0], rows], tl.float32)
        for block in range(first_block, end_block):
            k = block * BLOCK_K + tl.arange(0, BLOCK_K)
            codes = tl.load(
                weight_ptr + n[:, None] * WIDTH + k[None, :],
                mask=n_mask[:, None] & (k < WIDTH)[None, :],
                other=0,
            ).to(tl.int32)
            group = block * (BLOCK_K // 16) + tl.arange(0, BLOCK_K // 16)[None, :]
            scales = tl.load(
                scales_ptr + n[:, None] * SCALE_WIDTH + group,
                mask=n_mask[:, None] & (group < SCALE_WIDTH),
                other=0,
            )
            inputs = block * (2 * BLOCK_K) + tl.arange(0, 2 * BLOCK_K)
            x = tl.load(
                x_ptr + row[:, None] * stride_x_row + inputs[None, :],
                mask=row_mask[:, None] & (inputs < 2 * WIDTH)[None, :],
                other=0.0,
            )
            even_x, odd_x = tl.split(tl.reshape(x, (rows, BLOCK_K, 2)))
            factor = _spread((scales.to(tl.int32) << 23).to(tl.float32, bitcast=True), BLOCK_K)
            even = (_code_value(codes & 15) * factor).to(dtype)
            odd = (_code_value(codes >> 4) * factor).to(dtype)
            total = tl.dot(even, tl.trans(even_x), total, input_precision="ieee")
            total = tl.dot(odd, tl.trans(odd_x), total, input_precision="ieee")
        return total

    @triton.jit
    def _half_factors(scales):  # type: ignore[no-untyped-def]
        """The factors of `_DECODE_TILE` for half a tile, [N, TILE_BYTES].

        scales [N] int32: those of the first 32 inputs in bits 0-7, of the others in bits 8-15.
        """
        pairs = tl.join(scales & 255, scales >> 8 & 255)
        return _spread(((pairs + 126) << 7) * 0x10001, _TILE_BYTES)

    @triton.jit
    def multiply_tiles(  # type: ignore[no-untyped-def]
        x_ptr,
        row,
        row_mask,
        stride_x_row,
        weight_ptr,
        scales_ptr,
        n,
        first_tile,
        end_tile,
        INPUTS: tl.constexpr,
    ):
        """[N, rows]: the products of rows of x with the rows n of a matrix, over some tiles."""
        TILES: tl.constexpr = (INPUTS + _TILE_INPUTS - 1) // _TILE_INPUTS
        total = tl.zeros([n.shape[0], row.shape[0]], tl.float32)
        k = tl.arange(0, _TILE_BYTES)
        tile_row = n // _TILE_ROWS * TILES * _TILE_ROWS + n % _TILE_ROWS
        code_ptr = weight_ptr + tile_row[:, None] * _TILE_BYTES + k[None, :]
        # The four scales of a row in a tile are read as one number, which is loaded ahead.
        scale_ptr = scales_ptr.to(tl.pointer_type(tl.int32)) + tile_row
        row_ptr = x_ptr + row[None, :] * stride_x_row + k[:, None]
        for tile in range(first_tile, end_tile):
            codes = tl.load(code_ptr + tile * (_TILE_ROWS * _TILE_BYTES))
            scales = tl.load(scale_ptr + tile * _TILE_ROWS)
            low, high = tl.inline_asm_elementwise(
                asm=_DECODE_TILE,
                constraints="=r,=r,=r,=r,r,r,r,r,r,r,r,r,r",
                args=[
                    codes,
                    _half_factors(scales),
                    _half_factors(scales >> 16),
                ],
                dtype=(tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=4,
            )
            first = tile * _TILE_INPUTS
            mask = row_mask[None, :] & (first + k < INPUTS)[:, None]
            x = tl.load(row_ptr + first, mask=mask, other=0.0)
            total = tl.dot(low, x, total)
            mask = row_mask[None, :] & (first + _TILE_BYTES + k < INPUTS)[:, None]
            x = tl.load(row_ptr + first + _TILE_BYTES, mask=mask, other=0.0)
            total = tl.dot(high, x, total)
        return total
