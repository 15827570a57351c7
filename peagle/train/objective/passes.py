"""The drafter's two passes in training: depth 0 once for each pack, then its chains, in segments.

The context pass runs every position with real inputs and keeps the keys and values of each layer. A
chain pass runs deeper rows against those: all depths at once for P-EAGLE (mask embedding,
mask_hidden), depth after depth for EAGLE-3 (the real next token and the drafter's own output at the
previous row: training-time test). Segments share the context pass: depth 0 runs once.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from peagle.drafter import Drafter
from peagle.drafter.block import Attend
from peagle.train.data.attention_mask import Mask, RowSet, attention


class PassCache(NamedTuple):
    """What chains read of the context rows, for each layer."""

    keys: tuple[Tensor, ...]  # [T, kv_heads, head_dim]
    values: tuple[Tensor, ...]  # [T, kv_heads, head_dim]
    outputs: tuple[Tensor, ...] = ()  # [T, d] of drafters with a convolution

    def map(self, function: Callable[[Tensor], Tensor]) -> "PassCache":
        return PassCache(*(tuple(map(function, part)) for part in self))

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.keys, *self.values, *self.outputs]


COMPILED_PASSES = (
    "context",
    "parallel",
    "chain",
    "refine_context",
    "refine_chains",
    "apply_dependency",
)
MIN_RECOMPILE_LIMIT = 64


class DrafterPasses(nn.Module):
    """All uses of the drafter's parameters are in this module's forward: DDP and FSDP hook it."""

    def __init__(self, drafter: Drafter, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.drafter = drafter
        self.dtype = dtype

    @property
    def trains_drafter(self) -> bool:
        """Whether the drafter itself is trained, not only its refinement and its heads."""
        return self.drafter.fc.weight.requires_grad

    def forward(self, name: str, *args: Any) -> Any:
        """Run the pass `name`. Weights stay float32; autocast computes in a lower `dtype`."""
        device = self.drafter.fc.weight.device.type
        with torch.autocast(device, self.dtype, enabled=self.dtype != torch.float32):
            return getattr(self, name)(*args)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile each pass as a graph of its own.

        EAGLE-3's depths and evaluation have shapes of their own, so the recompile limit is raised.
        """
        limit = torch._dynamo.config.recompile_limit
        torch._dynamo.config.recompile_limit = max(limit, MIN_RECOMPILE_LIMIT)
        for name in COMPILED_PASSES:
            setattr(self, name, torch.compile(getattr(self, name), *args, **kwargs))

    def context(
        self, ids: Tensor, taps: Tensor, positions: Tensor, mask: Mask
    ) -> tuple[Tensor, Tensor, PassCache]:
        """Run depth 0: (normed [T, d], feedback [T, d], what chains read of it)."""
        drafter = self.drafter
        keys: dict[int, Tensor] = {}
        values: dict[int, Tensor] = {}
        outputs: dict[int, Tensor] = {}

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys.setdefault(layer, k)  # A checkpointed block calls this twice.
            values.setdefault(layer, v)
            return attention(q, k, v, mask)

        def previous(layer: int, hidden: Tensor) -> None:
            outputs[layer] = hidden

        normed, feedback = drafter(
            drafter.embed(ids), drafter.combine_hidden_states(taps), positions, attend, previous
        )
        cache = PassCache(*(tuple(part.values()) for part in (keys, values, outputs)))
        return normed, feedback, cache

    def parallel(
        self, positions: Tensor, cache: PassCache, mask: Mask, before: Tensor | None = None
    ) -> Tensor:
        """Run P-EAGLE's deeper rows, all depths at once: normed [R, d].

        A convolution needs `before` [R], the index of the row before each row: of the context rows,
        or behind them of these rows.
        """
        drafter = self.drafter
        assert drafter.mask_hidden is not None and drafter.mask_embedding is not None
        rows = len(positions)
        hidden = drafter.combine_hidden_states(drafter.mask_hidden[None]).expand(rows, -1)
        embeds = drafter.mask_embedding.expand(rows, -1).to(hidden.dtype)
        attend = _attend_with_context(cache, mask)

        def previous(layer: int, hidden: Tensor) -> Tensor | None:
            return None if before is None else torch.cat([cache.outputs[layer], hidden])[before]

        return drafter(embeds, hidden, positions, attend, previous)[0]

    def chain(
        self, ids: Tensor, hidden: Tensor, positions: Tensor, cache: PassCache, mask: Mask
    ) -> tuple[Tensor, Tensor, PassCache]:
        """Run one depth of EAGLE-3: (normed, feedback [R, d], this depth's keys and values)."""
        drafter = self.drafter
        own: dict[int, tuple[Tensor, Tensor]] = {}

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            own.setdefault(layer, (k, v))
            return _attend_with_context(cache, mask)(layer, q, k, v)

        normed, feedback = drafter(drafter.embed(ids), hidden, positions, attend)
        keys = tuple(k for k, _ in own.values())
        values = tuple(v for _, v in own.values())
        return normed, feedback, PassCache(keys, values)

    def refine_context(
        self, normed: Tensor, next_ids: Tensor, cache: PassCache
    ) -> tuple[Tensor, PassCache]:
        """Refine depth 0: (refined [T, d], the cache with the keys and values of the refinement).

        These rows are the first of their blocks: each attends to itself alone, and all passes of a
        refinement give the same.
        """
        own: list[tuple[Tensor, Tensor]] = []

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            own.append((k, v))
            return v.repeat_interleave(q.shape[1] // v.shape[1], 1)

        depth = torch.zeros_like(next_ids)
        refined = self.drafter.refine_rows(normed, next_ids, depth, attend)
        [(keys, values)] = own
        return refined, PassCache((*cache.keys, keys), (*cache.values, values), cache.outputs)

    def refine_chains(
        self, normed: Tensor, previous_ids: Tensor, depth: Tensor, cache: PassCache, mask: Mask
    ) -> Tensor:
        """One pass of a refinement over deeper rows, given the tokens before theirs: [R, d]."""
        attend = _attend_with_context(cache, mask)
        return self.drafter.refine_rows(normed, previous_ids, depth, attend)

    def apply_dependency(self, normed: Tensor, previous_ids: Tensor) -> Tensor:
        """Correct rows [R, d] by the drafts before them, [R]; a row with -1 stays as it is."""
        drafter = self.drafter
        assert drafter.dependency is not None
        embeds = embedding(previous_ids.clamp(min=0), drafter.embed_tokens)
        corrected = drafter.dependency(normed, embeds)
        return torch.where(previous_ids[:, None] >= 0, corrected, normed)

    def confidence_logits(self, normed: Tensor, log_probs: Tensor) -> Tensor:
        """Log-odds [R] that the drafts of rows [R, d], of these log-probabilities, are accepted."""
        return self.drafter.confidence_logits(normed, log_probs)

    def zero_loss(self) -> Tensor:
        """A zero on which every parameter has an effect in autograd (optim/parallel.py)."""
        return sum(
            (parameter.sum() * 0 for parameter in self.drafter.parameters()),
            torch.zeros((), device=self.drafter.fc.weight.device),
        )


def _attend_with_context(cache: PassCache, mask: Mask) -> Attend:
    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys = torch.cat([cache.keys[layer], k])
        return attention(q, keys, torch.cat([cache.values[layer], v]), mask)

    return attend


def rows_before_in_chain(rows: RowSet, context: int) -> Tensor:
    """[R]: before depth 1 is the context row of the anchor; deeper rows follow one another.

    Padding rows, whose anchors lie behind the `context` rows, read themselves: no two rows read the
    same row, and none reads the padding of the context, whose states may be any numbers.
    """
    own = context + torch.arange(len(rows), device=rows.anchor.device)
    first = torch.where(rows.anchor < context, rows.anchor, own)
    return torch.where(rows.depth > 1, own - 1, first)
