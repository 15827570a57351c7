"""Drafting with a KV cache: from the tokens that the target has verified to the next K drafts."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from peagle.drafter import Drafter
from peagle.drafter.block import Attend
from peagle.drafter.convolution import rows_before
from peagle.drafter.model import row_mask
from peagle.row_layout import DrafterRows, draft_rows
from peagle.target.cache import RollbackCache


@dataclass(frozen=True, slots=True)
class Verified:
    """One target pass over a request: the tokens it consumed and what it found."""

    ids: Tensor  # [T] tokens consumed, at positions first..first + T - 1
    hidden: Tensor  # [T, taps * d] their g
    first: int
    rejected: int  # the last `rejected` tokens are not part of the answer
    newest: Tensor  # [1] the newest token, not consumed yet


class Proposer(Protocol):
    def propose(self, verified: Verified, k: int) -> Tensor:
        """The next k drafts, [k]. Must be called once after every target pass."""
        ...


class ParallelProposer:
    """P-EAGLE: context rows and K - 1 mask rows in one pass.

    The mask rows are removed from the cache: the next pass runs these positions with real inputs.
    """

    def __init__(self, drafter: Drafter) -> None:
        assert drafter.mask_hidden is not None and drafter.config.mask_token_id is not None
        self.drafter = drafter
        self.cache = RollbackCache(len(drafter.layers))
        self.mask_id = drafter.config.mask_token_id
        # [1, d], projected once
        self.mask_hidden = drafter.combine_hidden_states(drafter.mask_hidden[None])

    @torch.inference_mode()
    def propose(self, verified: Verified, k: int) -> Tensor:
        rows = request_rows(verified, k, self.mask_id)
        context = self.drafter.combine_hidden_states(verified.hidden[: rows.num_real])
        hidden = torch.cat([context, self.mask_hidden.expand(k - 1, -1)])  # [R, d]
        config = self.drafter.config
        block = k - 1 if config.bidirectional else 0
        attend = attend_over(self.cache, block, config.sliding_window)
        normed, _ = self.drafter(
            self.drafter.embed(rows.ids), hidden, rows.positions, attend, rows_before(k - 1)
        )
        self.cache.rollback(verified.first + rows.num_real)
        refined = self.drafter.refine(normed[rows.sampled], verified.newest)
        return self.drafter.drafts(refined)[0]


class ChainProposer:
    """EAGLE-3: context rows in one pass, then K - 1 passes of one row each.

    Each of these rows gets the last draft and the drafter's own hidden state.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.cache = RollbackCache(len(drafter.layers))

    @torch.inference_mode()
    def propose(self, verified: Verified, k: int) -> Tensor:
        rows = request_rows(verified, 1, mask_id=0)
        ids = rows.ids
        hidden = self.drafter.combine_hidden_states(verified.hidden[: rows.num_real])
        positions = rows.positions
        drafts = []
        attend = attend_over(self.cache, window=self.drafter.config.sliding_window)
        for _ in range(k):
            embeds = self.drafter.embed(ids)
            normed, feedback = self.drafter(embeds, hidden, positions, attend)
            ids = self.drafter.greedy_token_ids(normed[-1:])
            hidden = feedback[-1:]
            positions = positions[-1:] + 1
            drafts.append(ids)
        self.cache.rollback(verified.first + rows.num_real)
        return torch.cat(drafts)


def proposer_for(drafter: Drafter) -> Proposer:
    if drafter.config.method == "p-eagle":
        return ParallelProposer(drafter)
    return ChainProposer(drafter)


def request_rows(verified: Verified, k: int, mask_id: int) -> DrafterRows:
    """The row layout for a batch of one request."""
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


def attend_over(cache: RollbackCache, block: int = 0, window: int | None = None) -> Attend:
    """An `attend` that appends the new rows to the cache.

    Each row sees the last `window` positions up to itself, and the last `block` rows also see each
    other.
    """

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, R, head_dim]
        keys, values = cache.update(k, v, layer)
        rows = q.shape[2]
        past = keys.shape[2] - rows
        mask = None
        if window is not None or (rows > 1 and (past or block)):
            mask = row_mask(rows, past, block, q.device, window)
        out = scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, is_causal=rows > 1 and mask is None, enable_gqa=True
        )
        return out[0].transpose(0, 1)

    return attend
