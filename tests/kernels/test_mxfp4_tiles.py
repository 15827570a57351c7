"""Tiles of MXFP4 matrices. The kernel that reads them is tested in test_engine_kernels.py."""

import pytest
import torch
from torch import Tensor

from peagle.kernels.expert_matrices import MAX_FAST_SCALE, ExpertMatrices, decode_mxfp4
from peagle.kernels.mxfp4_tiles import TILE_BYTES, from_tiles, to_tiles
from tests.support.kernels.expert_kernel_cases import random_bytes

UNIT_SCALE = 127


def decode_words(tiles: Tensor) -> Tensor:
    """Decode the weights [16, 128] of one tile with the shifts and masks of the kernel."""
    words = tiles.contiguous().view(torch.int32).long() & 0xFFFFFFFF  # [16, 16]
    patterns = (
        words & 0x81C081C0,
        words << 3 & 0x81C081C0,
        words << 2 & 0x80008000 | words << 6 & 0x01C001C0,
        words << 1 & 0x80008000 | words >> 3 & 0x01C001C0,
    )
    halves = [torch.stack([x & 0xFFFF, x >> 16 & 0xFFFF], -1) for x in patterns]
    values = [(x << 16).int().view(torch.float32) * 2.0**126 for x in halves]
    low, high = (torch.cat(values[i : i + 2], -1).flatten(-2) for i in (0, 2))
    return torch.cat([low, high], -1)


def test_shifts_and_masks_decode_every_code() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(4).view(16, TILE_BYTES)
    scales = torch.full((16, 4), UNIT_SCALE, dtype=torch.uint8)
    tiles, _ = to_tiles(codes, scales)
    expected = decode_mxfp4(codes, scales, torch.float32)
    assert torch.equal(decode_words(tiles[0, 0]), expected)


@pytest.mark.parametrize(("rows", "inputs"), [(16, 128), (48, 64), (32, 2880)])
def test_tiles_are_converted_back(rows: int, inputs: int) -> None:
    codes = random_bytes(0, 256, rows, inputs // 2)
    scales = random_bytes(0, 256, rows, inputs // 32)
    tiles, tile_scales = to_tiles(codes, scales)
    count = -(-inputs // 128)
    assert tiles.shape == (rows // 16, count, 16, TILE_BYTES) and tiles.is_contiguous()
    assert tile_scales.shape == (rows // 16, count, 16, 4) and tile_scales.is_contiguous()
    again = from_tiles(tiles, tile_scales, inputs)
    assert torch.equal(again[0], codes) and torch.equal(again[1], scales)


def test_matrices_are_tiled_for_a_gpu() -> None:
    codes = random_bytes(0, 256, 3, 32, 48)
    scales = random_bytes(100, MAX_FAST_SCALE + 1, 3, 32, 3)
    matrices = ExpertMatrices(codes, scales)
    tiled = matrices.for_gpu(torch.bfloat16)
    assert tiled.is_tiled and tiled.for_gpu(torch.bfloat16) is tiled
    assert (tiled.num_experts, tiled.outputs, tiled.inputs) == (3, 32, 96)
    for expert in range(3):
        dense = tiled.dense(expert, torch.float32)
        assert torch.equal(dense, matrices.dense(expert, torch.float32))


def test_matrices_that_are_not_tiled() -> None:
    """float32 rows, scales that are too large, and unsupported numbers of outputs."""
    codes = random_bytes(0, 256, 2, 32, 32)
    scales = random_bytes(100, 120, 2, 32, 2)
    matrices = ExpertMatrices(codes, scales)
    assert matrices.for_gpu(torch.float32) is matrices
    large = ExpertMatrices(codes, scales + (MAX_FAST_SCALE - 100))
    assert large.for_gpu(torch.bfloat16) is large
    odd = ExpertMatrices(codes[:, :24], scales[:, :24])
    assert odd.for_gpu(torch.bfloat16) is odd
