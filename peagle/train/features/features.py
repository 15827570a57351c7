"""Features of a pack: the target's taps and its last hidden state at every token, computed here or read back."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from peagle.errors import UserError
from peagle.target import Target
from peagle.train.data.attention_mask import BlockMask, attention, context_mask
from peagle.train.data.documents import Documents
from peagle.train.data.pack import Batch
from peagle.train.features.stored import StoredTarget
from peagle.train.objective.loss import TopK, capped

PACKED = "peagle_packed"
LOGITS = 1 << 26  # of top_k, that are there at once


class Features:
    """Documents as a padded batch, which any target takes; or, `packed`, flat with flex attention, compiled."""

    def __init__(self, target: Target, aux_layer_ids: Sequence[int], packed: bool = False) -> None:
        self.target, self.packed, self.aux = target, packed, tuple(aux_layer_ids)
        target.tap(aux_layer_ids)
        self.softcap = float(getattr(target.config, "final_logit_softcapping", None) or 0)
        require_plain_head(target, self.softcap)
        self.before = target.model.config._attn_implementation if packed else ""
        if packed:
            self._pack()

    def _pack(self) -> None:
        target = self.target
        target.model.set_attn_implementation(register_packed())
        if target.model.config._attn_implementation != PACKED:
            raise UserError(
                f"the attention of target {target.name!r} cannot be exchanged: use compile = false"
            )
        for layer in target.layers:
            layer.forward = torch.compile(
                layer.forward
            )  # one graph serves all layers; the taps stay outside

    def release(self) -> None:
        """The target is as it was, for whoever runs it next."""
        if self.packed:
            self.target.model.set_attn_implementation(self.before)
            for layer in self.target.layers:
                del layer.forward  # the class's own again

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """g [T, taps * d], last hidden state [T, d]; rows of padding hold anything."""
        if self.target.aux_layer_ids != self.aux:  # somebody else has run it
            self.target.tap(self.aux)
        if self.packed:
            mask = context_mask(batch.context, batch.blocks)
            out = self.target.features(
                batch.ids[None], position_ids=batch.position[None], block_mask=mask
            )
            return out.hidden[0], out.logits[0]
        return self._padded(batch)

    def _padded(self, batch: Batch) -> tuple[Tensor, Tensor]:
        total, width = sum(batch.lengths), max(batch.lengths)
        ids = batch.ids.new_zeros(len(batch.lengths), width)
        doc, position = batch.context.doc[:total], batch.position[:total]
        ids[doc, position] = batch.ids[:total]
        out = self.target.features(ids)
        size = len(batch.ids)
        g = out.hidden.new_zeros(size, out.hidden.shape[-1])
        last = out.logits.new_zeros(size, out.logits.shape[-1])
        g[:total], last[:total] = out.hidden[doc, position], out.logits[doc, position]
        return g, last


class Remembered:
    """Features computed once per document and kept on the device: later epochs run without the target."""

    def __init__(self, features: Features, documents: Documents) -> None:
        self.features, self.softcap, self.target, self.aux = (
            features,
            features.softcap,
            features.target,
            features.aux,
        )
        target, tokens = features.target, len(documents.ids)
        self.g = torch.empty(tokens, width_of(features), dtype=target.dtype, device=target.device)
        self.last = torch.empty(
            tokens, target.hidden_size, dtype=target.dtype, device=target.device
        )
        self.known = np.zeros(documents.numbers.max(initial=-1) + 1, dtype=bool)

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        assert batch.source is not None and batch.chosen is not None
        if self.known[batch.chosen].all():
            return self.g[batch.source], self.last[batch.source]
        g, last = self.features(batch)
        total = sum(batch.lengths)
        self.g[batch.source[:total]], self.last[batch.source[:total]] = g[:total], last[:total]
        self.known[batch.chosen] = True
        return g, last


class Chosen:
    """Some of the taps that another run's features hold."""

    def __init__(self, features: "Features | Remembered", aux_layer_ids: Sequence[int]) -> None:
        self.features, self.softcap, self.target = features, features.softcap, features.target
        self.aux, held, d = tuple(aux_layer_ids), features.aux, features.target.hidden_size
        if missing := [i for i in self.aux if i not in held]:
            raise UserError(
                f"taps {missing} are not among those at hand, {list(held)}: set aux_layer_ids to some of them"
            )
        columns = [range(held.index(i) * d, held.index(i) * d + d) for i in self.aux]
        self.columns = torch.tensor(
            [c for part in columns for c in part], device=features.target.device
        )

    def __call__(self, batch: Batch) -> tuple[Tensor, Any]:
        g, last = self.features(batch)
        return g[:, self.columns], last


class StoredFeatures(Features):
    """Those of a capture, of any of its documents; the teacher is a TopK."""

    def __init__(self, target: StoredTarget, target_ids: Tensor | None) -> None:
        """`target_ids`: the draft vocabulary."""
        self.target, self.softcap, self.shards, self.aux = (
            target,
            0.0,
            target.shards,
            target.aux_layer_ids,
        )
        self.draft_ids = torch.arange(target.vocab_size, dtype=torch.int32, device=target.device)
        if target_ids is not None:
            self.draft_ids.fill_(-1)
            own = target_ids.to(target.device)
            self.draft_ids[own] = torch.arange(len(own), dtype=torch.int32, device=target.device)

    def __call__(self, batch: Batch) -> tuple[Tensor, Any]:
        """g [T, taps * d], TopK of T rows; rows of padding hold zeros."""
        assert batch.chosen is not None
        wanted = zip(batch.chosen.tolist(), batch.lengths, strict=True)
        parts = zip(*(self.shards.rows(number, length) for number, length in wanted), strict=True)
        g, logits, tokens = (self._filled(list(part), len(batch.ids)) for part in parts)
        return g.to(self.target.dtype), TopK(logits, self.draft_ids[tokens])

    def _filled(self, parts: list[Tensor], size: int) -> Tensor:
        """[size, ...] on the device, zeros behind."""
        device = self.target.device
        out = torch.empty(
            size, *parts[0].shape[1:], dtype=parts[0].dtype, pin_memory=device.type == "cuda"
        )
        total = sum(len(part) for part in parts)
        torch.cat(parts, out=out[:total])
        out[total:] = 0
        return out.to(device, non_blocking=True)


AnyFeatures = Features | Remembered | Chosen


def online(features: AnyFeatures) -> Features | Chosen:
    """Those that take documents never seen before."""
    if isinstance(features, Chosen):
        whole = features.features
        return Chosen(whole.features if isinstance(whole, Remembered) else whole, features.aux)
    return features.features if isinstance(features, Remembered) else features


def with_taps(features: AnyFeatures, aux_layer_ids: Sequence[int]) -> AnyFeatures:
    """The features of these taps, from ones that hold them, perhaps among others."""
    whole = features.features if isinstance(features, Chosen) else features
    return whole if tuple(aux_layer_ids) == whole.aux else Chosen(whole, aux_layer_ids)


def width_of(features: Features) -> int:
    return len(features.aux) * features.target.hidden_size


def memorable(features: Features, documents: Documents, needed: float) -> bool:
    """On a GPU with room for them beside the bytes `needed` for training."""
    target = features.target
    if target.device.type != "cuda":
        return False
    size = len(documents.ids) * (width_of(features) + target.hidden_size) * target.dtype.itemsize
    return size + needed < 0.95 * torch.cuda.mem_get_info(target.device)[0]


def packable(target: Target) -> bool:
    """Plain causal attention in every layer: what the packed road computes."""
    config = target.config
    odd = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return (
        not odd
        and not getattr(config, "attn_logit_softcapping", None)
        and config.model_type != "gpt_oss"
    )


def register_packed() -> str:
    if PACKED not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(PACKED, _packed_attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(PACKED, lambda *args, **kwargs: None)
    return PACKED


def _packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    block_mask: BlockMask,
    **more: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, T, head_dim] -> [1, T, heads, head_dim]"""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return attention(q, k, v, block_mask, more.get("scaling"))[None], None


@torch.no_grad()
def top_k(
    last: Tensor, lm_head: Tensor, k: int, softcap: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """last [T, d] -> log-probabilities [T, k] of the likeliest tokens and their ids; few rows at a time.

    Log-probabilities, because the likeliest ones are near 0, where 16 bits are fine.
    """
    values, ids = [], []
    for part in last.split(max(1, LOGITS // len(lm_head))):
        logits = capped(linear(part, lm_head).float(), softcap)
        best = logits.topk(k)
        values.append(
            (best.values - logits.logsumexp(-1, keepdim=True)).clamp(min=-6e4).to(dtype).cpu()
        )
        ids.append(best.indices.int().cpu())
    return torch.cat(values), torch.cat(ids)


@torch.no_grad()
def require_plain_head(target: Target, softcap: float) -> None:
    """Training reads the teacher as lm_head(last hidden state): tried, for some targets scale it."""
    ids = torch.arange(6, device=target.device)[None] % target.vocab_size
    logits = target.model(input_ids=ids, use_cache=False).logits.float()
    mine = capped(linear(target.features(ids).logits, target.lm_head).float(), softcap)
    if not torch.allclose(mine, logits, rtol=0.05, atol=0.02 * float(logits.abs().max())):
        raise UserError(
            f"target {target.name!r} does more to its logits than lm_head and soft-capping: it cannot be a teacher here"
        )
