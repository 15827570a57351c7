"""MXFP4 matrices in the order in which the kernels of a GPU read them.

A tile is 16 rows of 128 inputs: 16 x 64 bytes of codes, and 16 x 4 scales. The tiles of 16 rows lie
one after another, so that a program reads memory without gaps; the last tile of a row is filled
up with zeros. Byte b of a row holds the codes of the inputs b (its low code) and 64 + b (its high
code): rows of x are multiplied half a tile at a time, without rearranging them.

The bits of eight codes, four bytes, are shuffled, so that a shift and a mask move a code to its
place in a bf16 number. Bytes 0 and 2 give the low 16 bits of the four, bytes 1 and 3 the high ones.
In 16 bits lie the low and high codes a and c of the first byte, and b and d of the second, each
with a sign s and a magnitude mmm:

    bit   15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
    code   a  d  c  b  d  d  d  a  a  a  b  b  b  c  c  c
           s  s  s  s  m  m  m  m  m  m  m  m  m  m  m  m
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

TILE_ROWS = 16
TILE_INPUTS = 128
TILE_BYTES = TILE_INPUTS // 2  # of a row
TILE_SCALES = TILE_INPUTS // 32  # of a row
# Of the codes a, b, c and d: where sign and magnitude begin in 16 bits.
SIGN_BITS = (15, 12, 13, 14)
MAGNITUDE_BITS = (6, 3, 0, 9)


def to_tiles(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """codes [N, K / 2], scales [N, K / 32] -> [N / 16, K / 128, 16, 64], [N / 16, K / 128, 16, 4].

    The codes of an input are in the low bits of a byte, those of the next one in the high bits.
    """
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(1)  # [N, K]
    padded = pad(nibbles, (0, -nibbles.shape[1] % TILE_INPUTS))
    low, high = padded.unflatten(1, (-1, 2, TILE_BYTES)).unbind(2)  # [N, tiles, 64]
    padded_scales = pad(scales, (0, -scales.shape[1] % TILE_SCALES))
    return (
        _rows_to_tiles(shuffle_codes(low, high)),
        _rows_to_tiles(padded_scales.unflatten(1, (-1, TILE_SCALES))),
    )


def from_tiles(tiles: Tensor, scales: Tensor, inputs: int) -> tuple[Tensor, Tensor]:
    """The inverse of `to_tiles` for K = inputs."""
    low, high = unshuffle_codes(_tiles_to_rows(tiles))
    nibbles = torch.stack([low, high], 2).flatten(1)[:, :inputs]
    even, odd = nibbles.unflatten(1, (-1, 2)).unbind(2)
    return even | odd << 4, _tiles_to_rows(scales).flatten(1)[:, : inputs // 32]


def _rows_to_tiles(rows: Tensor) -> Tensor:
    """[N, tiles, width] -> [N / 16, tiles, 16, width]"""
    return rows.unflatten(0, (-1, TILE_ROWS)).transpose(1, 2).contiguous()


def _tiles_to_rows(tiles: Tensor) -> Tensor:
    return tiles.transpose(1, 2).flatten(0, 1)


def shuffle_codes(low: Tensor, high: Tensor) -> Tensor:
    """low and high codes [.., B] of bytes, B a multiple of 4 -> the shuffled bytes [.., B]"""
    (a, b), (c, d) = (x.int().unflatten(-1, (-1, 2, 2)).unbind(-2) for x in (low, high))
    halves = torch.zeros_like(a)  # [.., B / 4, low or high 16 bits]
    for code, sign, magnitude in zip((a, b, c, d), SIGN_BITS, MAGNITUDE_BITS, strict=True):
        halves |= (code >> 3) << sign | (code & 7) << magnitude
    return torch.stack([halves & 255, halves >> 8], -1).to(torch.uint8).flatten(-3)


def unshuffle_codes(shuffled: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `shuffle_codes`."""
    first, second = shuffled.int().unflatten(-1, (-1, 2, 2)).unbind(-1)
    halves = first | second << 8
    a, b, c, d = (
        ((halves >> sign & 1) << 3 | halves >> magnitude & 7).to(torch.uint8)
        for sign, magnitude in zip(SIGN_BITS, MAGNITUDE_BITS, strict=True)
    )
    return torch.stack([a, b], -2).flatten(-3), torch.stack([c, d], -2).flatten(-3)
