"""The row layout: which rows the drafter runs after a verification, for a ragged batch of requests.

The target has just consumed the tokens `ids` of a request at consecutive positions; the last
`rejected` of them are discarded. `next_ids` holds the newest token of each request, which the
target has not consumed yet. Ids shift by one, hidden states and positions do not, and K drafts
need K-1 mask rows:

    K=3, ids 10 11 12 13 at positions 5..8, one rejected, next token 100, mask M:

    row        0    1    2    3    4
    id         11   12   100  M    M
    position   5    6    7    8    9
    hidden     g5   g6   g7   mask mask
    predicts   -    -    1st  2nd  3rd draft

Rejected rows store nothing in the KV cache. The next pass overwrites mask rows with real ones.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DrafterRows:
    """The rows of one drafter pass, request after request."""

    ids: Tensor  # [R]
    positions: Tensor  # [R]
    source: Tensor  # [R] index of the row's hidden state among the verified tokens; -1: mask_hidden
    starts: Tensor  # [B + 1] rows starts[b]..starts[b + 1] belong to request b
    sampled: Tensor  # [B, K] the rows whose output is draft 1..K

    @property
    def num_real(self) -> int:
        """The number of rows with real inputs, which stay in the KV cache, for a batch of one."""
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
) -> DrafterRows:
    """Lay out the drafter's rows. With k = 1 there are no mask rows: the first pass of EAGLE-3.

    ids [T]; starts [B + 1] of each request's tokens in ids; first [B] the position of its first
    token; rejected, next_ids [B].
    """
    real = starts.diff() - rejected  # [B] rows with real inputs, at least 1
    counts = real + k - 1
    row_starts = torch.cat([starts.new_zeros(1), counts.cumsum(0)])
    request = torch.repeat_interleave(torch.arange(len(real), device=ids.device), counts)  # [R]
    # [R] row number within its request
    local = torch.arange(len(request), device=ids.device) - row_starts[request]
    source = starts[request] + local
    shifted = ids[(source + 1).clamp(max=len(ids) - 1)]
    is_newest = local == real[request] - 1
    is_mask = local >= real[request]
    row_ids = torch.where(is_mask, mask_id, torch.where(is_newest, next_ids[request], shifted))
    sampled = (row_starts[:-1] + real - 1)[:, None] + torch.arange(k, device=ids.device)
    return DrafterRows(
        ids=row_ids,
        positions=first[request] + local,
        source=torch.where(is_mask, -1, source),
        starts=row_starts,
        sampled=sampled,
    )
