"""The rows of one model pass over several requests, and where their keys and values are stored.

Rows are flat: request b owns the rows row_starts[b] .. row_starts[b] + row_counts[b] - 1. Its row i
has position first_positions[b] + i and attends to every position of its request up to its own.
Rows that belong to no request (padding) have KV slot -1.

    page_size=4, page_tables 7 2 and 5 0, row_starts 0 3, row_counts 3 1, first_positions 3 1:

    row             0    1    2    3
    request         0    0    0    1
    position        3    4    5    1
    KV slot         31   8    9    21

There are two exceptions to causal attention:

* The rows of a draft tree (peagle/draft_shape.py) have the positions of their depths, are stored in
  the KV slots of positions first_positions[b] + i, and attend to each other by `tree_masks`.
* The last `bidirectional_rows` rows of each request attend to each other in both directions.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


@dataclass(slots=True)
class RowPass:
    positions: Tensor  # [T] int64
    kv_slots: Tensor  # [T] int64: where the key and value of a row are stored; -1: nowhere
    page_tables: Tensor  # [B, P] int32: the pages of each request
    row_starts: Tensor  # [B] int32
    row_counts: Tensor  # [B] int32
    first_positions: Tensor  # [B] int32
    max_rows: int  # upper bound of row_counts, known on the host
    page_size: int  # positions per page
    tree_masks: Tensor | None = None  # [T] int64: bit j is set if the row attends to row j
    tree_depth: int = 0  # upper bound of the depth of a tree's rows; 0: not known
    bidirectional_rows: int = 0
    reads_new_keys: bool = False  # A request may read keys that another one stores in this pass.
    _cache: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def cached(self, key: Hashable, build: Callable[[], T]) -> T:
        """Return the value of `build()`, computed once and shared by all layers of the pass."""
        if key not in self._cache:
            self._cache[key] = build()
        value: T = self._cache[key]
        return value

    def rotary_angles(self, rope_table: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The cosines and sines of the rows, [T, 1, rot / 2] each, for all layers of the pass.

        rope_table [max_positions, rot] holds the cosines of rot / 2 frequencies, then their sines.
        Positions behind its end take its last row.
        """

        def look_up() -> tuple[Tensor, Tensor]:
            positions = self.positions.long().clamp(max=len(rope_table) - 1)
            cos, sin = rope_table[positions].to(dtype)[:, None].chunk(2, -1)
            return cos, sin

        return self.cached(("rotary_angles", dtype), look_up)


def visible_keys(
    first: int,
    count: int,
    key_positions: Tensor,
    window: int,
    tree: tuple[Tensor, Tensor] | None,
    bidirectional_rows: int,
) -> Tensor:
    """[count, keys] bool: the keys that each row of one request attends to.

    The rows begin at position `first`; `tree` holds the masks and positions of its rows.
    """
    if tree is not None:
        masks, positions = tree
        bits = masks[:, None] >> (key_positions - first).clamp(min=0) & 1
        return torch.where(
            key_positions < first, key_positions > positions[:, None] - window, bits == 1
        )
    end = first + count
    positions = (first + torch.arange(count, device=key_positions.device))[:, None]
    last = torch.where(positions >= end - bidirectional_rows, end - 1, positions)
    return (key_positions <= last) & (key_positions > positions - window)
