"""The drafter's two passes in training: depth 0 once per pack, then its chains, in segments.

The context pass runs every position with real inputs and keeps each layer's keys and values. A chain pass runs deeper
rows against those: all at once for P-EAGLE (mask embedding, mask_hidden), depth after depth for EAGLE-3 (the real next
token, the drafter's own output at the row before: training-time test). Whoever splits the chains into segments pays
for depth 0 once.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from peagle.drafter import Drafter
from peagle.drafter.model import Attend
from peagle.train.data.attention_mask import Mask, attention

KeysValues = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]  # per layer [T, kv_heads, head_dim]


class Passes(nn.Module):
    """All that touches the drafter's parameters happens in this module's forward: DDP and FSDP watch it."""

    def __init__(self, drafter: Drafter, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.drafter, self.dtype = drafter, dtype

    @property
    def learns(self) -> bool:
        """Whether the drafter itself is trained, not only what corrects and judges its rows."""
        return self.drafter.fc.weight.requires_grad

    def forward(self, which: str, *args: Any) -> Any:
        """Weights stay as they are (float32); below float32, autocast computes in `dtype`."""
        device = self.drafter.fc.weight.device.type
        with torch.autocast(device, self.dtype, enabled=self.dtype != torch.float32):
            return getattr(self, which)(*args)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """The passes, each a graph of its own; EAGLE-3's depths and evaluation bring shapes of their own."""
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
        for name in ("context", "parallel", "chain", "correct"):
            setattr(self, name, torch.compile(getattr(self, name), *args, **kwargs))

    def context(
        self, ids: Tensor, g: Tensor, positions: Tensor, mask: Mask
    ) -> tuple[Tensor, Tensor, KeysValues]:
        """Depth 0: (normed [T, d], feedback [T, d], keys and values of every layer)."""
        drafter = self.drafter
        keys: dict[int, Tensor] = {}
        values: dict[int, Tensor] = {}

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys.setdefault(layer, k)  # a checkpointed block comes by twice
            values.setdefault(layer, v)
            return attention(q, k, v, mask)

        normed, feedback = drafter(
            drafter.embed(ids), drafter.combine_hidden_states(g), positions, attend
        )
        return normed, feedback, (tuple(keys.values()), tuple(values.values()))

    def parallel(self, positions: Tensor, cache: KeysValues, mask: Mask) -> Tensor:
        """P-EAGLE's deeper rows, all depths at once: normed [R, d]."""
        drafter = self.drafter
        assert drafter.mask_hidden is not None and drafter.mask_embedding is not None
        rows = len(positions)
        hidden = drafter.combine_hidden_states(drafter.mask_hidden[None]).expand(rows, -1)
        embeds = drafter.mask_embedding.expand(rows, -1).to(hidden.dtype)
        return drafter(embeds, hidden, positions, _with_context(cache, mask))[0]

    def chain(
        self, ids: Tensor, hidden: Tensor, positions: Tensor, cache: KeysValues, mask: Mask
    ) -> Any:
        """EAGLE-3, one depth: (normed, feedback [R, d], this depth's keys and values)."""
        drafter = self.drafter
        own: dict[int, tuple[Tensor, Tensor]] = {}

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            own.setdefault(layer, (k, v))
            return _with_context(cache, mask)(layer, q, k, v)

        normed, feedback = drafter(drafter.embed(ids), hidden, positions, attend)
        return (
            normed,
            feedback,
            (tuple(k for k, _ in own.values()), tuple(v for _, v in own.values())),
        )

    def correct(self, normed: Tensor, ids: Tensor) -> Tensor:
        """Rows [R, d] that know the draft before them, ids [R]; -1: that one is not told."""
        drafter = self.drafter
        assert drafter.dependency is not None
        told = drafter.dependency(normed, embedding(ids.clamp(min=0), drafter.embed_tokens))
        return torch.where(ids[:, None] >= 0, told, normed)

    def judge(self, normed: Tensor, sure: Tensor) -> Tensor:
        """Log-odds that the drafts of rows [R, d] are accepted, [R]; `sure`: their log-probabilities."""
        return self.drafter.confidence_logits(normed, sure)

    def touch(self) -> Tensor:
        """Nothing, but every parameter takes part in it: see parallel.py."""
        return sum(
            (parameter.sum() * 0 for parameter in self.drafter.parameters()),
            torch.zeros((), device=self.drafter.fc.weight.device),
        )


def _with_context(cache: KeysValues, mask: Mask) -> Attend:
    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = cache
        return attention(q, torch.cat([keys[layer], k]), torch.cat([values[layer], v]), mask)

    return attend
