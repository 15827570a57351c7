"""The features of a pack: the target's taps and the teacher at every token.

They come from the target (`FeatureExtractor`), from the memory of the GPU (`CachedFeatures`), from
a capture (`StoredFeatures`), or they are some of the taps of another source (`SelectedTaps`).
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from peagle.errors import UserError
from peagle.target import Target
from peagle.train.data.attention_mask import context_mask
from peagle.train.data.documents import Documents
from peagle.train.data.pack import Batch
from peagle.train.features.packed_attention import PACKED_ATTENTION, register_packed_attention
from peagle.train.features.teacher import PackFeatures, soft_cap

MAX_MEMORY_FRACTION = 0.95  # of the free GPU memory, for the cache and training together


class FeatureSource(Protocol):
    @property
    def target(self) -> Target: ...

    @property
    def aux_layer_ids(self) -> tuple[int, ...]: ...

    @property
    def softcap(self) -> float:
        """The soft-capping of the target's logits that the teacher still lacks; 0 is none."""
        ...

    def __call__(self, batch: Batch) -> PackFeatures: ...

    def uncached(self) -> "FeatureSource":
        """A source of the same taps that accepts documents it has never seen."""
        ...


class FeatureExtractor:
    """Runs the target.

    Documents are a padded batch, which every target accepts; or, if `packed`, one sequence with
    flex attention, compiled.
    """

    def __init__(self, target: Target, aux_layer_ids: Sequence[int], packed: bool = False) -> None:
        self.target = target
        self.packed = packed
        self.aux_layer_ids = tuple(aux_layer_ids)
        target.tap(aux_layer_ids)
        self.softcap = float(getattr(target.config, "final_logit_softcapping", None) or 0)
        check_plain_head(target, self.softcap)
        self._attention_before = target.model.config._attn_implementation if packed else ""
        if packed:
            self._use_packed_attention()

    def _use_packed_attention(self) -> None:
        target = self.target
        target.model.set_attn_implementation(register_packed_attention())
        if target.model.config._attn_implementation != PACKED_ATTENTION:
            raise UserError(
                f"the attention of target {target.name!r} cannot be replaced: use compile = false"
            )
        for layer in target.layers:
            # One graph serves all layers; the taps stay outside of it.
            layer.forward = torch.compile(layer.forward)

    def release(self) -> None:
        """Restore the target's own attention."""
        if self.packed:
            self.target.model.set_attn_implementation(self._attention_before)
            for layer in self.target.layers:
                del layer.forward  # The class's own method is visible again.

    def uncached(self) -> FeatureSource:
        return self

    def __call__(self, batch: Batch) -> PackFeatures:
        if self.target.aux_layer_ids != self.aux_layer_ids:  # Another user has changed the taps.
            self.target.tap(self.aux_layer_ids)
        if self.packed:
            mask = context_mask(batch.context.unwindowed, batch.block_lists)
            out = self.target.features(
                batch.ids[None], position_ids=batch.positions[None], block_mask=mask
            )
            return PackFeatures(out.taps[0], out.last_hidden[0])
        return self._run_padded(batch)

    def _run_padded(self, batch: Batch) -> PackFeatures:
        size = len(batch.ids)
        total = sum(batch.lengths)
        ids = batch.ids.new_zeros(len(batch.lengths), max(batch.lengths))
        doc = batch.context.doc[:total]
        position = batch.positions[:total]
        ids[doc, position] = batch.ids[:total]
        out = self.target.features(ids)
        taps = out.taps.new_zeros(size, out.taps.shape[-1])
        last_hidden = out.last_hidden.new_zeros(size, out.last_hidden.shape[-1])
        taps[:total] = out.taps[doc, position]
        last_hidden[:total] = out.last_hidden[doc, position]
        return PackFeatures(taps, last_hidden)


class CachedFeatures:
    """Features computed once per document and kept on the device: later epochs skip the target."""

    def __init__(self, source: FeatureExtractor, documents: Documents) -> None:
        self.source = source
        self.softcap = source.softcap
        self.target = target = source.target
        self.aux_layer_ids = source.aux_layer_ids
        tokens = len(documents.ids)
        self.taps = torch.empty(
            tokens, taps_width(source), dtype=target.dtype, device=target.device
        )
        self.last_hidden = torch.empty(
            tokens, target.hidden_size, dtype=target.dtype, device=target.device
        )
        self.cached = np.zeros(documents.indices.max(initial=-1) + 1, dtype=bool)  # [documents]

    def uncached(self) -> FeatureSource:
        return self.source

    def __call__(self, batch: Batch) -> PackFeatures:
        tokens = batch.token_indices
        assert tokens is not None and batch.document_indices is not None
        if self.cached[batch.document_indices].all():
            return PackFeatures(self.taps[tokens], self.last_hidden[tokens])
        features = self.source(batch)
        assert isinstance(features.teacher, Tensor)
        total = sum(batch.lengths)
        self.taps[tokens[:total]] = features.taps[:total]
        self.last_hidden[tokens[:total]] = features.teacher[:total]
        self.cached[batch.document_indices] = True
        return features


class SelectedTaps:
    """Some of the taps of another source."""

    def __init__(self, source: FeatureSource, aux_layer_ids: Sequence[int]) -> None:
        self.source = source
        self.softcap = source.softcap
        self.target = source.target
        self.aux_layer_ids = tuple(aux_layer_ids)
        available = source.aux_layer_ids
        if missing := [i for i in self.aux_layer_ids if i not in available]:
            raise UserError(
                f"taps {missing} are not among the available ones, {list(available)}:"
                " set aux_layer_ids to some of those"
            )
        d = source.target.hidden_size
        starts = [available.index(i) * d for i in self.aux_layer_ids]
        columns = [column for start in starts for column in range(start, start + d)]
        self.columns = torch.tensor(columns, device=source.target.device)

    def uncached(self) -> FeatureSource:
        return SelectedTaps(self.source.uncached(), self.aux_layer_ids)

    def __call__(self, batch: Batch) -> PackFeatures:
        features = self.source(batch)
        return PackFeatures(features.taps[:, self.columns], features.teacher)


def select_taps(source: FeatureSource, aux_layer_ids: Sequence[int]) -> FeatureSource:
    """A source of exactly these taps, from one that has them, perhaps among others."""
    base = source.source if isinstance(source, SelectedTaps) else source
    if tuple(aux_layer_ids) == base.aux_layer_ids:
        return base
    return SelectedTaps(base, aux_layer_ids)


def taps_width(source: FeatureSource) -> int:
    return len(source.aux_layer_ids) * source.target.hidden_size


def cache_fits(source: FeatureSource, documents: Documents, training_bytes: float) -> bool:
    """Whether the features of all documents fit a GPU beside `training_bytes`."""
    target = source.target
    if target.device.type != "cuda":
        return False
    width = taps_width(source) + target.hidden_size
    cache_bytes = len(documents.ids) * width * target.dtype.itemsize
    free_bytes = torch.cuda.mem_get_info(target.device)[0]
    return cache_bytes + training_bytes < MAX_MEMORY_FRACTION * free_bytes


@torch.no_grad()
def check_plain_head(target: Target, softcap: float) -> None:
    """Refuse a target whose logits are not lm_head(last hidden state), as training assumes."""
    ids = torch.arange(6, device=target.device)[None] % target.vocab_size
    logits = target.model(input_ids=ids, use_cache=False).logits.float()
    last_hidden = target.features(ids).last_hidden
    computed = soft_cap(linear(last_hidden, target.lm_head).float(), softcap)
    if not torch.allclose(computed, logits, rtol=0.05, atol=0.02 * float(logits.abs().max())):
        raise UserError(
            f"target {target.name!r} computes its logits with more than lm_head and soft-capping:"
            " it cannot be a teacher here"
        )
