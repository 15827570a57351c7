"""The path of each row of a draft tree, from the bits of its mask: which row lies at which depth.

    mask 0b10011 (rows 0, 1 and 4)   ->   path 0 1 4 0 0 ..

A parent has a smaller row number than its child, so the set bits are in the order of the depths.

Shapes: tree_masks [T] int64 -> paths [T, max_rows] int32, zeros behind the end of a path.
"""

import torch
from torch import Tensor

from peagle.kernels.row_pass import RowPass
from peagle.kernels.triton import uses_triton
from peagle.kernels.triton.launch.dependent_launch import launch_options

try:
    import triton
    import triton.language as tl

    from peagle.kernels.triton.launch.dependent_launch import launch_next, wait_for_inputs
except ImportError:  # without Triton the reference runs
    triton = None


def reference(tree_masks: Tensor, max_rows: int) -> Tensor:
    """The same computation in plain PyTorch."""
    row = torch.arange(max_rows, device=tree_masks.device)
    on_path = (tree_masks[:, None] >> row & 1).bool()
    depth = torch.where(on_path, on_path.cumsum(1) - 1, max_rows)
    paths = torch.zeros(len(tree_masks), max_rows + 1, dtype=torch.int32, device=row.device)
    return paths.scatter_(1, depth, row.int().expand_as(depth))[:, :max_rows].contiguous()


if triton is not None:

    @triton.jit
    def _tree_paths_kernel(  # type: ignore[no-untyped-def]
        masks_ptr, paths_ptr, MAX_ROWS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
    ):
        wait_for_inputs(DEPENDENT)
        launch_next(DEPENDENT)
        tree_row = tl.program_id(0).to(tl.int64)
        row = tl.arange(0, BLOCK)
        mask = tl.load(masks_ptr + tree_row)
        on_path = ((mask >> row.to(tl.int64)) & 1).to(tl.int32)
        on_path = tl.where(row < MAX_ROWS, on_path, 0)
        length = tl.sum(on_path, 0)
        depth = tl.cumsum(on_path, 0) - 1
        path_ptr = paths_ptr + tree_row * MAX_ROWS
        tl.store(path_ptr + depth, row, mask=on_path == 1)
        tl.store(path_ptr + row, tl.zeros_like(row), mask=(row >= length) & (row < MAX_ROWS))


def tree_paths(rows: RowPass) -> Tensor:
    """The paths of a pass, computed once for all of its layers."""
    assert rows.tree_masks is not None
    masks = rows.tree_masks
    return rows.cached("tree_paths", lambda: _tree_paths(masks, rows.max_rows))


def _tree_paths(tree_masks: Tensor, max_rows: int) -> Tensor:
    if not uses_triton(tree_masks):
        return reference(tree_masks, max_rows)
    paths = torch.empty(len(tree_masks), max_rows, dtype=torch.int32, device=tree_masks.device)
    _tree_paths_kernel[(len(tree_masks),)](
        tree_masks,
        paths,
        MAX_ROWS=max_rows,
        BLOCK=triton.next_power_of_2(max_rows),
        num_warps=1,
        **launch_options(tree_masks),
    )
    return paths
