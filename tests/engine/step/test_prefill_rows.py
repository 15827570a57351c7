"""The rows of a prefill pass."""

import torch

from peagle.engine.schedule.prefill_layout import PrefillInput, PrefillSize, part_lengths
from peagle.engine.step.prefill_rows import draft_rows, target_rows


def test_requests_may_read_keys_of_the_same_pass() -> None:
    """Requests share pages of a prefix when the pass that fills them is planned, so keys must be
    stored by a launch before attention.
    """
    size = PrefillSize(rows=4, requests=2, mask_rows=1, max_rows=3)
    parts = {name: torch.zeros(n, dtype=torch.int64) for name, n in part_lengths(size)}
    inputs = PrefillInput(**parts)
    tables = torch.zeros(2, 1, dtype=torch.int32)
    ends = torch.full((2,), 16)
    assert target_rows(inputs, tables, size, 16).reads_new_keys
    assert draft_rows(inputs, tables, size, ends, 16).reads_new_keys
