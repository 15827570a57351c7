"""The sizes of blocks and tiles of the experts' products (expert_gemm.py), measured on an H200."""

from functools import cache
from typing import NamedTuple

import torch

from peagle.kernels.expert_matrices import ExpertMatrices
from peagle.kernels.mxfp4_tiles import TILE_BYTES

try:
    import triton
except ImportError:  # without Triton the references run
    triton = None

MIN_BLOCK_ROWS = 8
# With fewer rows, tensor cores would add the products of 8-bit weights in another order.
MIN_8BIT_BLOCK_ROWS = 16
MAX_BLOCK_ROWS = 128
MAX_16BIT_BLOCK_ROWS = 256  # of long prompts, whose limit is arithmetic
MAX_16BIT_SHARED_BYTES = 196_608  # of a program with such a block, which few GPUs have
MAX_TILED_BLOCK_ROWS = 64
ALIKE_ROWS = 16  # for which a block has room, if the pass has so many
BUSY_EXPERTS: tuple[int, ...] = (4, 16)  # mean rows; from each of them on, room for twice as many
BUSY_PROGRAMS = 264  # programs that keep a GPU busy
MAX_SPLITS = 4


class ExpertTiles(NamedTuple):
    block_n: int
    block_k: int  # elements of a stored row: inputs, or bytes of MXFP4
    num_warps: int
    num_stages: int


def block_rows(matrices: ExpertMatrices, mean_rows: float, rows: int) -> int:
    """Rows of a block: enough for most experts, whose numbers of rows differ.

    The rows of a draft choose much the same experts: with 8 requests of 6 rows, few experts have
    3 rows, as the mean says; most have 6, 12 or 18, and matrices should not be read twice. With
    8 trees of 16 rows and a mean of 16, many have more than 32. With MXFP4, whose limit are
    instructions, wide blocks cost more than that.
    """
    alike_rows = 1
    if not matrices.is_mxfp4:
        alike_rows = ALIKE_ROWS << sum(mean_rows >= busy for busy in BUSY_EXPERTS)
    wanted = min(rows, max(int(1.5 * mean_rows) + 1, alike_rows))
    most = MAX_TILED_BLOCK_ROWS if matrices.is_tiled else MAX_BLOCK_ROWS
    if matrices.weight.element_size() == 2 and holds_large_blocks(matrices.weight.device):
        most = MAX_16BIT_BLOCK_ROWS
    least = MIN_BLOCK_ROWS if matrices.scales is None or matrices.is_mxfp4 else MIN_8BIT_BLOCK_ROWS
    return min(max(least, triton.next_power_of_2(wanted)), most)


@cache
def holds_large_blocks(device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    properties = torch.cuda.get_device_properties(device)
    shared_bytes: int = getattr(properties, "shared_memory_per_block_optin", 0)
    return shared_bytes >= MAX_16BIT_SHARED_BYTES


def num_splits(matrices: ExpertMatrices, assignments: int) -> int:
    """Programs that share the inputs of an output, if the outputs of few experts are too few.

    Decoding MXFP4 takes more instructions, and therefore more programs.
    """
    blocks = max(min(assignments, matrices.num_experts) * matrices.outputs // 64, 1)
    busy = BUSY_PROGRAMS * (4 if matrices.is_mxfp4 else 1)
    return min(max(busy // blocks, 1), MAX_SPLITS)


def tile_sizes(
    matrices: ExpertMatrices, block_t: int, assignments: int, gated: bool
) -> ExpertTiles:
    """Sizes measured on an H200."""
    if matrices.is_tiled:  # With four warps, tensor cores would get codes in pairs, not in fours.
        block_n = 32 if gated and assignments <= 8 else 64
        return ExpertTiles(block_n, TILE_BYTES, num_warps=2, num_stages=3)
    if matrices.is_mxfp4:
        return ExpertTiles(block_n=64, block_k=32, num_warps=4, num_stages=3)
    if block_t <= 32:
        return ExpertTiles(block_n=64, block_k=128, num_warps=4, num_stages=3)
    if block_t > MAX_BLOCK_ROWS:
        return ExpertTiles(block_n=128, block_k=64, num_warps=8, num_stages=4)
    # 98,304 bytes with blocks of 64 rows in 16 bits: an H200 has room for two programs.
    num_stages = 4 if block_t <= 64 and matrices.weight.element_size() == 2 else 3
    return ExpertTiles(block_n=128, block_k=64, num_warps=4, num_stages=num_stages)
