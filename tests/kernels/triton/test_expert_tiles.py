"""Tile sizes of experts fit into the shared memory of a GPU."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from peagle.kernels.expert_matrices import ExpertMatrices
from peagle.kernels.triton.experts import tiles


@pytest.mark.parametrize(
    ("shared_bytes", "expected"),
    [(232_448, 256), (166_912, 128), (101_376, 128)],  # H200, A100, L40S
)
def test_blocks_of_long_prompts(
    monkeypatch: pytest.MonkeyPatch, shared_bytes: int, expected: int
) -> None:
    properties = SimpleNamespace(shared_memory_per_block_optin=shared_bytes)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    holds = tiles.holds_large_blocks.__wrapped__(torch.device("cuda"))
    monkeypatch.setattr(tiles, "holds_large_blocks", lambda device: holds)
    matrices = ExpertMatrices(torch.empty(8, 4, 4, dtype=torch.bfloat16))
    assert tiles.block_rows(matrices, mean_rows=200, rows=4096) == expected
    single = ExpertMatrices(torch.empty(8, 4, 4))
    assert tiles.block_rows(single, mean_rows=200, rows=4096) == 128
    tile = tiles.tile_sizes(matrices, expected, 4096, gated=False)
    stage_bytes = 2 * tile.block_k * (tile.block_n + expected)
    assert stage_bytes * tile.num_stages <= shared_bytes


@pytest.mark.parametrize(
    ("rows", "top_k", "experts", "expected"),
    [
        (8, 4, 32, 8),
        (8 * 8, 8, 128, 32),  # Qwen3-30B-A3B, chains
        (8 * 16, 8, 128, 32),  # trees: few experts receive rows of three requests
        (8 * 16, 4, 32, 64),  # GPT-OSS-20B, trees
        (8 * 32, 8, 128, 64),
    ],
)
def test_block_sizes_allow_for_requests_with_the_same_experts(
    rows: int, top_k: int, experts: int, expected: int
) -> None:
    matrices = ExpertMatrices(torch.empty(experts, 4, 4, dtype=torch.bfloat16))
    assert tiles.block_rows(matrices, rows * top_k / experts, rows) == expected


def test_blocks_of_busy_experts_fit_every_gpu() -> None:
    matrices = ExpertMatrices(torch.empty(8, 4, 4, dtype=torch.bfloat16))
    tile = tiles.tile_sizes(matrices, 64, 512, gated=True)
    assert 2 * tile.block_k * (tile.block_n + 64) * tile.num_stages <= 101_376  # L40S
