"""From a verified batch to its next drafts, over pages: parallel (P-EAGLE) and chain (EAGLE-3).

`Verified` is what one target pass consumed, in blocks of a fixed width: row i of a block lies at position first + i,
its drafts up to `kept` count, and `newest` follows them. Drafting runs the rows that count through the drafter with
their real inputs, so that its pages hold the context, and then looks ahead. What it sees there becomes a chain, and a
tree where one is asked for.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.draft_shape import DraftShape
from peagle.drafter import Drafter
from peagle.drafter.branching import Branching
from peagle.engine.kv.kv_cache import KVCache
from peagle.engine.model.fused_llama import FusedLlamaDrafter
from peagle.engine.model.weight import Weight
from peagle.kernels.row_pass import RowPass
from peagle.kernels.triton.argmax import argmax
from peagle.kernels.triton.build_tree import DraftTrees, build_tree
from peagle.kernels.triton.expand_rows import (
    DrafterInputs,
    ExpandedRows,
    VerifiedBlock,
    expand_rows,
)
from peagle.kernels.triton.gather_rows import kv_slots


@dataclass(frozen=True, slots=True)
class Verified:
    block: Tensor  # [B, R] the tokens consumed
    hidden: Tensor  # [B * R, taps * d] their g
    first: Tensor  # [B] int32
    kept: Tensor  # [B] int32: drafts accepted; rows 0..kept count
    newest: Tensor  # [B]
    tables: Tensor  # [B, P] int32
    ends: Tensor  # [B] int32: rows from this position on are not stored


class DraftRunner:
    def __init__(
        self, drafter: Drafter, behind: int, length: int, page: int, memory: KVCache
    ) -> None:
        config = drafter.config
        self.drafter, self.page, self.memory = drafter, page, memory
        self.lean = FusedLlamaDrafter(drafter, behind, length)
        self.parallel = config.method == "p-eagle"
        self.fc = (
            Weight(drafter.fc.weight)
            if drafter.input_norm is None and drafter.fc_norm is None
            else drafter.fuse
        )
        d = drafter.fc.weight.new_zeros(config.hidden_size)
        self.mask_id = -1 if config.mask_token_id is None else config.mask_token_id
        self.mask_embedding = (
            d if drafter.mask_embedding is None else drafter.mask_embedding.detach()
        )
        with torch.no_grad():
            self.mask_hidden = (
                d if drafter.mask_hidden is None else drafter.fuse(drafter.mask_hidden[None])[0]
            )
        self.head, self.feeds_normed = Weight(drafter.lm_head), config.norm_output
        self.branching = Branching(drafter, Weight)
        self.judges = not d.is_cuda and bool(config.calibration or config.confidence)
        self.plain = drafter.dependency is None and not self.judges
        self.uncalibrated = self.branching
        if (
            self.judges and drafter.confidence is not None
        ):  # it has learned to correct what is not calibrated
            self.uncalibrated = Branching(drafter, Weight, (1.0,))

    def quantize(self) -> None:
        """Matrices in int8 from now on."""
        self.lean.quantize()
        self.head.quantize()
        if isinstance(self.fc, Weight):
            self.fc.quantize()

    def draft(
        self, verified: Verified, tree: DraftShape, index: Tensor, trees: DraftTrees
    ) -> Tensor | None:
        """What comes next, to the places `index` [B] of `trees`; with K = 0 only the context is kept up.

        Returns the outlook of the chain, where there is one.
        """
        width = max(tree.k, 1) if self.parallel else 1
        made = expand_rows(
            VerifiedBlock(
                verified.block,
                self.fc(verified.hidden),
                verified.first,
                verified.kept,
                verified.newest,
                verified.tables,
                verified.ends,
            ),
            DrafterInputs(
                self.drafter.embed_tokens, self.mask_embedding, self.mask_hidden, self.mask_id
            ),
            self.page,
            width,
        )
        if not made.kv_slots.is_cuda:
            made = living(made)
        most = verified.block.shape[1] + width - 1
        rows = RowPass(
            made.positions,
            made.kv_slots,
            verified.tables,
            made.row_starts,
            made.row_counts,
            verified.first,
            most,
            self.page,
            bidirectional_rows=self.both(tree.k),
        )
        normed, stream = self.lean.forward(made.embeds, made.hidden, rows, self.memory)
        if not tree.k:
            return None
        return self.look_ahead(normed, stream, made.draft_rows, verified, tree, index, trees)

    def both(self, k: int) -> int:
        """Mask rows that see each other."""
        return k - 1 if k > 1 and self.drafter.config.bidirectional else 0

    def look_ahead(
        self,
        normed: Tensor,
        stream: Tensor,
        sampled: Tensor,
        verified: Verified,
        tree: DraftShape,
        index: Tensor,
        trees: DraftTrees,
    ) -> Tensor | None:
        """From the rows `sampled` of a pass: all of them (P-EAGLE), or the first (EAGLE-3). Returns as `draft` does."""
        if not self.parallel:
            trees.chain[index, : tree.k] = self.follow(normed, stream, sampled, verified, tree.k)
            return None
        if tree.chain and self.plain:
            trees.chain[index, : tree.k] = self.best(normed[sampled]).view(-1, tree.k)
            return None
        return self.branch(normed[sampled], tree, index, trees)

    def branch(
        self, normed: Tensor, tree: DraftShape, index: Tensor, trees: DraftTrees
    ) -> Tensor | None:
        """normed [B * K, d]: the rows that look ahead."""
        ids, logp = self.branching(normed, self.head(normed), tree.k)
        build_tree(
            logp, ids, self.drafter.target_ids, 0 if tree.chain else tree.nodes, index, trees
        )
        if not self.judges:  # on a GPU the host plans a step ahead, and would learn of it too late
            return None
        if self.uncalibrated is not self.branching:
            ids, logp = self.uncalibrated(normed, self.head(normed), tree.k)
        return self.outlook(
            normed.unflatten(0, (-1, tree.k)), ids, logp, trees.chain[index, : tree.k]
        )

    def outlook(self, normed: Tensor, ids: Tensor, logp: Tensor, chain: Tensor) -> Tensor:
        """[B, K]: how likely each draft of the chain is to be accepted, given that those before it are."""
        at = (
            (self.drafter.known(ids) == chain[..., None]).int().argmax(-1)
        )  # [B, K] among the candidates
        before = at.roll(1, 1) if logp.shape[2] > 1 else torch.zeros_like(at)
        sure = logp.gather(2, before[..., None, None].expand(-1, -1, 1, logp.shape[3]))[
            :, :, 0
        ].gather(2, at[..., None])
        if (
            self.drafter.confidence is not None
            and self.drafter.dependency is not None
            and chain.shape[1] > 1
        ):
            told = self.drafter.embed(chain[:, :-1].flatten()).view_as(normed[:, 1:])
            normed = torch.cat([normed[:, :1], self.drafter.dependency(normed[:, 1:], told)], 1)
        return self.drafter.judge(normed, sure[..., 0]).sigmoid()

    def follow(
        self, normed: Tensor, stream: Tensor, sampled: Tensor, verified: Verified, k: int
    ) -> Tensor:
        """EAGLE-3: the drafts [B, k], each row fed with the draft before."""
        ids = self.best(normed[sampled])
        state = (normed if self.feeds_normed else stream)[
            sampled
        ]  # [B, d]: fed to the next row, with its draft
        drafts, position = [ids], (verified.first + verified.kept)[:, None]
        one = torch.ones_like(verified.first)
        starts = torch.arange(len(one), dtype=torch.int32, device=one.device)
        for _ in range(k - 1):
            position = position + 1
            slots = kv_slots(verified.tables, position, self.page, verified.ends[:, None])[:, 0]
            at = position[:, 0]
            rows = RowPass(at, slots, verified.tables, starts, one, at, 1, self.page)
            normed, stream = self.lean.forward(self.drafter.embed(ids), state, rows, self.memory)
            ids, state = self.best(normed), normed if self.feeds_normed else stream
            drafts.append(ids)
        return torch.stack(drafts, 1)

    def best(self, normed: Tensor) -> Tensor:
        """The likeliest target id of each row."""
        ids, _ = argmax(self.head(normed))
        return ids if self.drafter.target_ids is None else self.drafter.target_ids[ids]


def living(made: ExpandedRows) -> ExpandedRows:
    """Without the dead rows: on a CPU no graph wants one shape, and every row costs."""
    batch = len(made.row_starts)
    live = torch.arange(len(made.kv_slots) // batch) < made.row_counts[:, None]  # [B, W]
    at = live.flatten().nonzero()[:, 0]
    starts = made.row_counts.cumsum(0) - made.row_counts
    shift = (made.row_starts - starts).repeat_interleave(len(made.draft_rows) // batch)
    embeds, hidden, positions, slots = (
        x[at] for x in (made.embeds, made.hidden, made.positions, made.kv_slots)
    )
    return ExpandedRows(
        embeds, hidden, positions, slots, starts.int(), made.row_counts, made.draft_rows - shift
    )
