"""Split-K in exact mode depends only on the matrix."""

import pytest
import torch

pytest.importorskip("triton")

from peagle.kernels.triton import skinny_gemm
from peagle.kernels.triton.batch_invariant import gemm, split_k


def matrix(outputs: int, inputs: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(outputs, inputs, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("outputs", "inputs", "splits"),
    [
        (6144, 4096, 2),
        (4096, 4096, 4),
        (4096, 14336, 4),
        (28672, 4096, 1),
        (576, 576, 1),
        (576, 1536, 3),
        (49152, 576, 1),
        (64, 100, 1),  # not aligned
    ],
)
def test_few_outputs_are_split(outputs: int, inputs: int, splits: int) -> None:
    """The table in split_k.py, and other shapes."""
    assert split_k.num_splits(matrix(outputs, inputs)) == splits


def test_weights_in_8_bits_are_not_split() -> None:
    assert split_k.num_splits(matrix(4096, 14336, torch.int8)) == 1


@pytest.mark.parametrize("block_t", [16, 32, 64])
@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 14336), (576, 1536), (49152, 768)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_tiles_fill_the_range_of_a_chain(
    shape: tuple[int, int], splits: int, block_t: int, dtype: torch.dtype
) -> None:
    """The range consists of whole blocks, followed by the weights that are loaded early."""
    outputs, inputs = shape
    tiles = gemm.few_rows_tiles(matrix(*shape, dtype), splits)
    if tiles is None:
        tiles = skinny_gemm.tile_sizes(outputs * splits, inputs // splits, block_t, gated=False)
    assert outputs % tiles.block_n == 0
    assert tiles.early <= inputs // splits
    assert (inputs // splits - tiles.early) % tiles.block_k == 0


def test_weights_in_8_bits_have_wide_tiles() -> None:
    """Narrow tiles would add the inputs in another order."""
    tiles = gemm.few_rows_tiles(matrix(576, 1536, torch.int8), 1)
    assert tiles is not None and tiles.block_n == 64


def test_partial_sums_are_added_in_order() -> None:
    parts = torch.tensor([1.0, 1e8, -1e8]).view(3, 1, 1)
    assert split_k.add_splits(parts, torch.float32).item() == 0.0  # (1 + 1e8) - 1e8
    assert split_k.add_splits(parts.flip(0), torch.float32).item() == 1.0
    whole = torch.ones(2, 3)
    assert split_k.add_splits(whole, torch.bfloat16) is whole
