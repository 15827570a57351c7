"""The state of every decode slot on the device, as the kernels of a step read and write it.

S slots exist; a step runs B of them. Positions 0 .. lengths - 1 of a slot's request are computed,
and `newest` is the token behind them, which the target has not consumed yet.
"""

from typing import NamedTuple

from torch import Tensor


class SlotState(NamedTuple):
    """Updated in place by `accept` and `accept_tree`."""

    page_tables: Tensor  # [S, pages] int32
    lengths: Tensor  # [S] int32: positions whose keys and values are computed
    ends: Tensor  # [S] int32: rows from this position on store no keys and values
    emitted: Tensor  # [S] int32: tokens generated so far
    newest: Tensor  # [S] int64


class SlotBatch(NamedTuple):
    """The slots of one step, with the values that they had when the step began."""

    slots: Tensor  # [B] int64; only the padding slot may occur twice
    first_positions: Tensor  # [B] int32: the position of the newest token
    ends: Tensor  # [B] int32
