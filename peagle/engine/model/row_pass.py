"""One pass over rows of several requests: which token, where it lies, who sees whom.

Rows are flat. Those of request b are starts[b] .. starts[b] + counts[b] - 1, at positions first[b], first[b] + 1, ...;
each sees every position of its request up to its own. Rows of nobody have slot -1.

Two exceptions: the rows of a tree have `masks` (peagle/tree.py), the positions of their depths and the slots of
first[b], first[b] + 1, ...; and the last `both` rows of each request see each other, later ones too.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from peagle.kernels.triton.rope_store import angles


@dataclass(slots=True)
class RowPass:
    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64: where a row's key and value are stored; -1: nowhere
    tables: Tensor  # [B, P] int32: the pages of each request
    starts: Tensor  # [B] int32
    counts: Tensor  # [B] int32
    first: Tensor  # [B] int32
    most: int  # no request has more rows than this
    page: int  # positions a page
    masks: Tensor | None = None  # [T] int64
    both: int = 0
    memo: dict[Any, Any] = field(default_factory=dict)  # on a CPU: what is made once for all layers

    def angles(self, table: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin of the rows, looked up once for all layers."""
        if "angles" not in self.memo:
            self.memo["angles"] = list(angles(self.positions, table, dtype))
        cos, sin = self.memo["angles"]
        return cos, sin
