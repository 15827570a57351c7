"""The row layout: which rows the drafter runs after a verification, for a ragged batch of requests.

The target has just consumed the tokens `ids` of a request at consecutive positions; the last `rejected` of them do not
count. `next_ids` holds the newest token of each request, not consumed yet. Ids shift by one, hidden states and
positions do not, and K drafts need K-1 mask rows:

    K=3, ids 10 11 12 13 at positions 5..8, one rejected, next token 100, mask M:

    row        0    1    2    3    4
    id         11   12   100  M    M
    position   5    6    7    8    9
    hidden     g5   g6   g7   mask mask
    predicts   -    -    1st  2nd  3rd draft

Rejected rows store nothing; mask rows are overwritten in the next pass by real ones.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    ids: Tensor  # [R]
    positions: Tensor  # [R]
    source: Tensor  # [R] index into the verified tokens of the row's hidden state; -1: mask_hidden
    starts: Tensor  # [B + 1] rows starts[b]..starts[b + 1] belong to request b
    sampled: Tensor  # [B, K] the rows whose output is draft 1..K

    @property
    def real(self) -> int:
        """Rows with real inputs, for a batch of one: those that stay in the drafter's cache."""
        assert len(self.starts) == 2
        return len(self.ids) - self.sampled.shape[1] + 1


def draft_rows(
    ids: Tensor,
    starts: Tensor,
    first: Tensor,
    rejected: Tensor,
    next_ids: Tensor,
    k: int,
    mask_id: int,
) -> Rows:
    """ids [T]; starts [B + 1] of each request's tokens in ids; first [B] position of its first token;
    rejected, next_ids [B]. With k = 1 there are no mask rows: EAGLE-3's first pass.
    """
    kept = starts.diff() - rejected  # [B] context rows of each request, at least 1
    counts = kept + k - 1
    row_starts = torch.cat([starts.new_zeros(1), counts.cumsum(0)])
    request = torch.repeat_interleave(torch.arange(len(kept), device=ids.device), counts)  # [R]
    local = (
        torch.arange(len(request), device=ids.device) - row_starts[request]
    )  # row number within its request
    source = starts[request] + local
    shifted = ids[(source + 1).clamp(max=len(ids) - 1)]
    newest, mask = local == kept[request] - 1, local >= kept[request]
    row_ids = torch.where(mask, mask_id, torch.where(newest, next_ids[request], shifted))
    sampled = (row_starts[:-1] + kept - 1)[:, None] + torch.arange(k, device=ids.device)
    return Rows(row_ids, first[request] + local, torch.where(mask, -1, source), row_starts, sampled)
