"""DraftRunner: from verified rows to the next drafts, over the paged KV cache.

P-EAGLE drafts all K tokens in one pass; EAGLE-3 drafts one token per pass. The rows of the first
pass, where the target has consumed x_0..x_{n-1} and x_n is the newest token (row_layout.py has the
layout of a batch):

    row                 embedding       hidden input   position   predicts
    j = 0..n-2          emb(x_{j+1})    g_j            j          nothing: context in the KV cache
    n-1                 emb(x_n)        g_{n-1}        n-1        draft 1
    n-1+k, k = 1..K-1   emb(mask id)    mask_hidden    n-1+k      draft k+1 (P-EAGLE only)

Only the rows that the target has just verified run again: those before are in the KV cache. They
run with real inputs, and so replace the mask rows of the pass before.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from peagle.draft_shape import DraftShape
from peagle.drafter import Drafter
from peagle.drafter.branching import Branching
from peagle.drafter.replacement import copy_weights
from peagle.engine.kv.kv_cache import KVCache
from peagle.engine.model.fused_llama import FusedLlamaDrafter
from peagle.engine.model.fused_refinement import FusedRefinement
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


class DraftRunner:
    def __init__(
        self, drafter: Drafter, first_layer: int, length: int, page_size: int, kv_cache: KVCache
    ) -> None:
        """`first_layer`: the index of the drafter's first layer in the KV cache."""
        config = drafter.config
        self.drafter = drafter
        self.first_layer = first_layer
        self.length = length
        self.page_size = page_size
        self.kv_cache = kv_cache
        self.quantized = False
        self.layers = FusedLlamaDrafter(drafter, first_layer, length)
        self.refinement: FusedRefinement | None = None
        if drafter.refinement is not None:
            self.refinement = FusedRefinement(drafter, drafter.refinement)
        self.parallel = config.method == "p-eagle"
        # g [T, taps * d] -> hidden input [T, d]
        self.fc: Callable[[Tensor], Tensor] = drafter.combine_hidden_states
        if drafter.input_norm is None and drafter.fc_norm is None:
            self.fc = Weight(drafter.fc.weight, dtype=drafter.dtype)
        self.lm_head = Weight(drafter.head_table, dtype=drafter.dtype)
        zeros = drafter.norm.weight.new_zeros(config.hidden_size)
        self.mask_embedding = zeros
        if drafter.mask_embedding is not None:
            self.mask_embedding = drafter.mask_embedding.detach()
        self.mask_hidden = zeros  # after fc
        if drafter.mask_hidden is not None:
            self.mask_hidden = combined_mask(drafter, drafter.mask_hidden)

        def make_product(weight: Tensor) -> Weight:
            return Weight(weight, dtype=drafter.dtype)

        mask_id = -1 if config.mask_token_id is None else config.mask_token_id
        self.inputs = DrafterInputs(
            drafter.embed_table, self.mask_embedding, self.mask_hidden, mask_id
        )
        self.branching = Branching(drafter, make_product)
        # On a GPU the host plans one step ahead: draft confidence would arrive too late.
        self.has_confidence = not zeros.is_cuda and bool(config.calibration or config.confidence)
        # The confidence output corrects log-probabilities that are not calibrated.
        self.confidence_branching = self.branching
        if self.has_confidence and drafter.confidence is not None:
            self.confidence_branching = Branching(drafter, make_product, (1.0,))
        # A chain is then the argmax of each row, and needs no candidates.
        self.independent_drafts = drafter.dependency is None and not self.has_confidence
        # Measurements replace the log-probabilities of a tree's candidates
        # (engine/sampling/forced_acceptance.py): [B, K, M], slots [B] -> [B, K, 1, M].
        self.forced_draw: Callable[[Tensor, Tensor], Tensor] | None = None

    def with_drafter(self, drafter: Drafter) -> "DraftRunner":
        """The same runner for another version of the drafter."""
        runner = DraftRunner(drafter, self.first_layer, self.length, self.page_size, self.kv_cache)
        if self.quantized:
            runner.quantize()
        return runner

    @torch.inference_mode()
    def copy_weights(self, drafter: Drafter) -> None:
        """Overwrite the weights by those of another version, where CUDA graphs read them.

        Merged weights share the memory of the drafter's own; what is computed from weights follows.
        Only on a GPU: copies of weights in the layouts of a CPU stay as they are.
        """
        own = self.drafter
        copy_weights(drafter, own)
        if own.mask_hidden is not None:
            self.mask_hidden.copy_(combined_mask(own, own.mask_hidden))
        self.branching.update(own)

    def quantize(self) -> None:
        """Multiply in int8 from now on."""
        self.quantized = True
        self.layers.quantize()
        if self.refinement is not None:
            self.refinement.quantize()
        self.lm_head.quantize()
        if isinstance(self.fc, Weight):
            self.fc.quantize()

    def draft(
        self, verified: VerifiedBlock, shape: DraftShape, slots: Tensor, trees: DraftTrees
    ) -> Tensor | None:
        """Write the next drafts to `slots` [B] of `trees`; with K = 0 only update the KV cache.

        Returns the draft confidence [B, K], if the drafter has it.
        """
        width = max(shape.k, 1) if self.parallel else 1  # rows that predict a draft
        expanded = expand_rows(
            verified._replace(hidden=self.fc(verified.hidden)), self.inputs, self.page_size, width
        )
        if not expanded.kv_slots.is_cuda:
            expanded = drop_padding_rows(expanded)
        rows = RowPass(
            expanded.positions,
            expanded.kv_slots,
            verified.page_tables,
            expanded.row_starts,
            expanded.row_counts,
            verified.first_positions,
            max_rows=verified.ids.shape[1] + width - 1,
            page_size=self.page_size,
            bidirectional_rows=self.bidirectional_rows(shape.k),
        )
        is_mask = None
        if self.layers.convolution and width > 1:
            is_mask = mask_row_flags(expanded, width)
        normed, residual = self.layers.forward(
            expanded.embeds, expanded.hidden, rows, self.kv_cache, is_mask
        )
        if not shape.k:
            return None
        return self.draft_from_pass(
            normed, residual, expanded.draft_rows, verified, shape, slots, trees
        )

    def bidirectional_rows(self, k: int) -> int:
        """The number of mask rows that attend to each other, later ones included."""
        return k - 1 if k > 1 and self.drafter.config.bidirectional else 0

    def draft_from_pass(
        self,
        normed: Tensor,
        residual: Tensor,
        sampled: Tensor,
        verified: VerifiedBlock,
        shape: DraftShape,
        slots: Tensor,
        trees: DraftTrees,
    ) -> Tensor | None:
        """Draft from the outputs normed, residual [T, d] of the first pass; returns as `draft`.

        `sampled`: the rows that predict a draft, [B * K] with P-EAGLE, [B] with EAGLE-3.
        """
        if self.parallel:
            refined = self.refine(normed[sampled], verified.newest, shape.k)
            return self.draft_parallel(refined, shape, slots, trees)
        drafts = self.draft_sequential(normed, residual, sampled, verified, shape.k)
        trees.chain[slots, : shape.k] = drafts
        return None

    def refine(self, normed: Tensor, newest: Tensor, k: int) -> Tensor:
        """The sampled rows [B * K, d] after the passes of the refinement (drafter/refinement.py).

        newest [B]: the newest token of each request.
        """
        if self.refinement is None:
            return normed
        refined = normed
        for _ in range(self.drafter.config.refinement):
            previous = newest[:, None]
            if k > 1:
                known = refined.unflatten(0, (-1, k))[:, :-1].flatten(0, 1)
                previous = torch.cat([previous, self.greedy_ids(known).view(-1, k - 1)], 1)
            refined = self.refinement(normed, previous.flatten(), k)
        return refined

    def draft_parallel(
        self, normed: Tensor, shape: DraftShape, slots: Tensor, trees: DraftTrees
    ) -> Tensor | None:
        """P-EAGLE: a chain, and a tree if the shape is one, from the sampled rows [B * K, d]."""
        k = shape.k
        if shape.is_chain and self.independent_drafts:
            trees.chain[slots, :k] = self.greedy_ids(normed).view(-1, k)
            return None
        ids, logp = self.branching(normed, self.lm_head(normed), k)
        nodes = 0 if shape.is_chain else shape.nodes
        if nodes and self.forced_draw is not None:
            logp = self.forced_draw(self.drafter.target_token_ids(ids), slots)
        build_tree(logp, ids, self.drafter.target_ids, nodes, slots, trees)
        if not self.has_confidence:
            return None
        if self.confidence_branching is not self.branching:
            ids, logp = self.confidence_branching(normed, self.lm_head(normed), k)
        chain = trees.chain[slots, :k]
        return draft_confidence(self.drafter, normed.unflatten(0, (-1, k)), ids, logp, chain)

    def draft_sequential(
        self, normed: Tensor, residual: Tensor, sampled: Tensor, verified: VerifiedBlock, k: int
    ) -> Tensor:
        """EAGLE-3: drafts [B, k], one pass each, fed with the draft before and its hidden state."""
        feeds_normed = self.drafter.config.norm_output
        ids = self.greedy_ids(normed[sampled])
        hidden = (normed if feeds_normed else residual)[sampled]  # [B, d]
        drafts = [ids]
        position = (verified.first_positions + verified.accepted_counts)[:, None]
        counts = torch.ones_like(verified.first_positions)  # one row per request
        starts = torch.arange(len(counts), dtype=torch.int32, device=counts.device)
        for _ in range(k - 1):
            position = position + 1
            slots = kv_slots(verified.page_tables, position, self.page_size, verified.ends[:, None])
            first = position[:, 0]
            rows = RowPass(
                first, slots[:, 0], verified.page_tables, starts, counts, first, 1, self.page_size
            )
            embeds = self.drafter.embed(ids)
            normed, residual = self.layers.forward(embeds, hidden, rows, self.kv_cache)
            ids = self.greedy_ids(normed)
            hidden = normed if feeds_normed else residual
            drafts.append(ids)
        return torch.stack(drafts, 1)

    def greedy_ids(self, normed: Tensor) -> Tensor:
        """normed [T, d] -> the most likely target id of each row, [T]."""
        ids, _ = argmax(self.lm_head(normed))
        return ids if self.drafter.target_ids is None else self.drafter.target_ids[ids]


def draft_confidence(
    drafter: Drafter, normed: Tensor, ids: Tensor, logp: Tensor, chain: Tensor
) -> Tensor:
    """The probability [B, K] that each draft is accepted, given that those before it are.

    It is the draft's own probability, corrected by the drafter's confidence output if it has one.

    normed [B, K, d]: the drafter's rows; chain [B, K]: the drafts; ids [B, K, M] and
    logp [B, K, 1 or M, M]: the candidates of each depth, and their log-probabilities, after each
    candidate of the depth before if drafts depend on each other.
    """
    # [B, K] index of each draft among the candidates of its depth, and of the draft before it
    index = (drafter.target_token_ids(ids) == chain[..., None]).int().argmax(-1)
    previous = index.roll(1, 1) if logp.shape[2] > 1 else torch.zeros_like(index)
    by_candidate = previous[..., None, None].expand(-1, -1, 1, logp.shape[3])
    draft_logp = logp.gather(2, by_candidate)[:, :, 0].gather(2, index[..., None])
    if drafter.confidence is not None and drafter.dependency is not None and chain.shape[1] > 1:
        embeds = drafter.embed(chain[:, :-1].flatten()).view_as(normed[:, 1:])
        normed = torch.cat([normed[:, :1], drafter.dependency(normed[:, 1:], embeds)], 1)
    return drafter.confidence_logits(normed, draft_logp[..., 0]).sigmoid()


@torch.no_grad()
def combined_mask(drafter: Drafter, mask_hidden: Tensor) -> Tensor:
    """The hidden input [d] of mask rows, from the taps [taps * d] that they have."""
    return drafter.combine_hidden_states(mask_hidden[None])[0]


def mask_row_flags(expanded: ExpandedRows, width: int) -> Tensor:
    """[T, 1] whether a row is a mask row; of a request's `width` draft rows, all but the first."""
    flags = expanded.kv_slots.new_zeros(len(expanded.kv_slots), 1, dtype=torch.bool)
    mask_rows = expanded.draft_rows.view(-1, width)[:, 1:].flatten().long()
    return flags.index_fill_(0, mask_rows, True)


def drop_padding_rows(expanded: ExpandedRows) -> ExpandedRows:
    """Remove the rows that pad each request to the same count.

    CUDA graphs need them, to have one shape; on a CPU every row costs time.
    """
    batch = len(expanded.row_starts)
    width = len(expanded.kv_slots) // batch
    is_real = torch.arange(width) < expanded.row_counts[:, None]  # [B, W]
    index = is_real.flatten().nonzero()[:, 0]
    starts = expanded.row_counts.cumsum(0) - expanded.row_counts
    shift = (expanded.row_starts - starts).repeat_interleave(len(expanded.draft_rows) // batch)
    return ExpandedRows(
        embeds=expanded.embeds[index],
        hidden=expanded.hidden[index],
        positions=expanded.positions[index],
        kv_slots=expanded.kv_slots[index],
        row_starts=starts.int(),
        row_counts=expanded.row_counts,
        draft_rows=expanded.draft_rows - shift,
    )
