"""Drafting with a cache: from what the target has just verified to the next K drafts."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from peagle.drafter import Drafter
from peagle.drafter.model import Attend, row_mask
from peagle.row_layout import DrafterRows, draft_rows
from peagle.target.cache import RollbackCache


@dataclass(frozen=True, slots=True)
class Verified:
    """One target pass over a request: what it consumed, and what came of it."""

    ids: Tensor  # [T] the tokens consumed, at positions first..first + T - 1
    hidden: Tensor  # [T, taps * d] their g
    first: int
    rejected: int  # the last `rejected` of them do not count
    newest: Tensor  # [1] the newest token, not consumed yet


class Proposer(Protocol):
    def propose(self, verified: Verified, k: int) -> Tensor:
        """The next k tokens as the drafter guesses them, [k]. Called once after every target pass."""
        ...


class ParallelProposer:
    """P-EAGLE: context rows and K-1 mask rows in one pass. The mask rows leave the cache again."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.cache = RollbackCache(len(drafter.layers))
        assert drafter.mask_hidden is not None and drafter.config.mask_token_id is not None
        self.mask_id = drafter.config.mask_token_id
        self.mask_hidden = drafter.fuse(drafter.mask_hidden[None])  # [1, d], projected once

    @torch.inference_mode()
    def propose(self, verified: Verified, k: int) -> Tensor:
        rows = rows_of(verified, k, self.mask_id)
        real = rows.num_real
        hidden = torch.cat(
            [self.drafter.fuse(verified.hidden[:real]), self.mask_hidden.expand(k - 1, -1)]
        )
        attend = attend_over(self.cache, k - 1 if self.drafter.config.bidirectional else 0)
        normed, _ = self.drafter(self.drafter.embed(rows.ids), hidden, rows.positions, attend)
        self.cache.rollback(verified.first + real)
        return self.drafter.drafts(normed[rows.sampled])[0]


class ChainProposer:
    """EAGLE-3: context rows, then K-1 passes of one row fed with the last draft and the drafter's own hidden state."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.cache = RollbackCache(len(drafter.layers))

    @torch.inference_mode()
    def propose(self, verified: Verified, k: int) -> Tensor:
        rows = rows_of(verified, 1, mask_id=0)
        hidden = self.drafter.fuse(verified.hidden[: rows.num_real])
        ids, positions, drafts = rows.ids, rows.positions, []
        for _ in range(k):
            normed, feedback = self.drafter(
                self.drafter.embed(ids), hidden, positions, attend_over(self.cache)
            )
            ids, hidden, positions = (
                self.drafter.best(normed[-1:]),
                feedback[-1:],
                positions[-1:] + 1,
            )
            drafts.append(ids)
        self.cache.rollback(verified.first + rows.num_real)
        return torch.cat(drafts)


def proposer_for(drafter: Drafter) -> Proposer:
    return (
        ParallelProposer(drafter) if drafter.config.method == "p-eagle" else ChainProposer(drafter)
    )


def rows_of(verified: Verified, k: int, mask_id: int) -> DrafterRows:
    """The row layout for a batch of one."""
    ids = verified.ids
    return draft_rows(
        ids,
        starts=ids.new_tensor([0, len(ids)]),
        first=ids.new_tensor([verified.first]),
        rejected=ids.new_tensor([verified.rejected]),
        next_ids=verified.newest,
        k=k,
        mask_id=mask_id,
    )


def attend_over(cache: RollbackCache, block: int = 0) -> Attend:
    """An `attend` that appends the new rows to the cache and lets each see everything up to itself, and the last
    `block` rows each other."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, R, head_dim]
        keys, values = cache.update(k, v, layer)
        rows, past = q.shape[2], keys.shape[2] - q.shape[2]
        mask = row_mask(rows, past, block, q.device) if rows > 1 and (past or block) else None
        out = scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, is_causal=rows > 1 and mask is None, enable_gqa=True
        )
        return out[0].transpose(0, 1)

    return attend
