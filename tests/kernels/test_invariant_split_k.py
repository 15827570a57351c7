"""Which matrices exact mode splits: a function of the matrix alone."""

import pytest
import torch

pytest.importorskip("triton")

from peagle.kernels.triton.batch_invariant import gemm, split_k


def matrix(outputs: int, inputs: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(outputs, inputs, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("outputs", "inputs", "splits"),
    [
        (6144, 4096, 2),
        (4096, 4096, 2),
        (4096, 14336, 2),
        (28672, 4096, 1),
        (576, 576, 1),
        (576, 1536, 3),
        (49152, 576, 1),
        (64, 100, 1),  # not aligned
    ],
)
def test_few_outputs_are_split(outputs: int, inputs: int, splits: int) -> None:
    """The table in split_k.py, and others."""
    assert split_k.num_splits(matrix(outputs, inputs)) == splits


def test_weights_in_8_bits_are_not_split() -> None:
    assert split_k.num_splits(matrix(4096, 14336, torch.int8)) == 1


@pytest.mark.parametrize("rows", [1, 8, 16, 17, 32, 33, 64])
@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 14336), (576, 1536), (49152, 768)])
def test_tiles_fill_the_range_of_a_chain(shape: tuple[int, int], splits: int, rows: int) -> None:
    """Weights that are loaded early, and whole blocks before them."""
    tiles = gemm.few_rows_tiles(matrix(*shape), rows, splits)
    split_inputs = shape[1] // splits
    assert shape[0] % tiles.block_n == 0
    assert tiles.early <= split_inputs
    assert (split_inputs - tiles.early) % tiles.block_k == 0


def test_partial_sums_are_added_in_their_order() -> None:
    parts = torch.tensor([1.0, 1e8, -1e8]).view(3, 1, 1)
    assert split_k.add_splits(parts, torch.float32).item() == 0.0  # (1 + 1e8) - 1e8
    assert split_k.add_splits(parts.flip(0), torch.float32).item() == 1.0
    whole = torch.ones(2, 3)
    assert split_k.add_splits(whole, torch.bfloat16) is whole
