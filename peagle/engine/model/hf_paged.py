"""Any transformers architecture over paged keys and values, through transformers' own attention interface.

The model computes what it always does; only where it would attend, it attends over pages. On a CPU that is the model's
own attention function, request by request, with a mask for the window; on a GPU the paged kernel, which knows sliding
windows, soft caps and sinks.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from peagle.engine.kv.kv_cache import KVCache
from peagle.engine.model.attention import query_blocks
from peagle.errors import UserError
from peagle.kernels.attention_params import AttentionParams
from peagle.kernels.row_pass import RowPass
from peagle.kernels.triton.paged_attention import paged_attention
from peagle.target import Target
from peagle.target.hf_attention import hf_attention

PREFIX = "peagle_paged_"


class HFPagedTarget:
    """Owns the target: while an engine holds it, its attention reads pages and nothing else."""

    def __init__(self, target: Target) -> None:
        self.target, model = target, target.model
        plain: Any = model.config._attn_implementation  # at rest: every pass puts it back
        self.before, self.name = plain, f"{PREFIX}{plain}"
        if self.name not in ALL_ATTENTION_FUNCTIONS:
            ALL_ATTENTION_FUNCTIONS.register(self.name, _attention(plain))
            ALL_MASK_ATTENTION_FUNCTIONS.register(self.name, lambda *args, **kwargs: None)
        self.taps: tuple[int, ...] = ()
        self.windows: dict[
            int, int | None
        ] = {}  # of each layer, as it tells its attention: known after a pass

    def forward(
        self, ids: Tensor, rows: RowPass, memory: KVCache, keep: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """ids [T] -> logits [kept rows or T, vocabulary], g [T, taps * d]."""
        model: Any = self.target.model
        if model.config._attn_implementation != self.name:
            model.set_attn_implementation(self.name)
            if model.config._attn_implementation != self.name:
                raise UserError(
                    f"target {self.target.name!r} cannot be batched: its attention cannot be exchanged"
                )
        if self.target.aux_layer_ids != self.taps:
            self.target.tap(self.taps)
        try:
            out = model(
                input_ids=ids[None],
                position_ids=rows.positions[None].long(),
                use_cache=False,
                logits_to_keep=0 if keep is None else keep,
                paged=(rows, memory, self.windows),
            )
            taps = [self.target._taps[i][0] for i in self.taps]
        finally:
            self.target._taps.clear()
            model.set_attn_implementation(self.before)
        return out.logits[0], torch.cat(taps, -1) if taps else out.logits.new_empty(len(ids), 0)


def _attention(plain: str) -> Callable[..., tuple[Tensor, Any]]:
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        paged: tuple[RowPass, KVCache, dict[int, int | None]],
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """query [1, heads, T, d], key and value [1, kv_heads, T, d] -> [1, T, heads, d]."""
        rows, memory, windows = paged
        layer: Any = module.layer_idx
        memory.store(layer, rows.kv_slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
        keys, values = memory.keys[layer], memory.values[layer]
        window = windows[layer] = kwargs.get("sliding_window")
        if query.is_cuda and kwargs.get("position_bias") is None:
            out = paged_attention(
                query[0].transpose(0, 1),
                keys,
                values,
                rows,
                AttentionParams(
                    kwargs.get("scaling") or query.shape[-1] ** -0.5,
                    window=window,
                    softcap=kwargs.get("softcap"),
                    sinks=kwargs.get("s_aux"),
                ),
                split_counters=memory.arrived,
            )
            return out[None], None
        out, run = torch.zeros_like(query).transpose(1, 2).contiguous(), hf_attention(plain, module)
        for block in query_blocks(rows, window, 1, query.dtype):
            count = block.end - block.start
            k, v = (block.read(x, rows).transpose(0, 1)[None] for x in (keys, values))
            q = pad(query[:, :, block.start : block.end], (0, 0, 0, len(block.mask) - count))
            result = run(module, q, k, v, block.mask[None, None], **kwargs)[0]
            out[:, block.start : block.end] = result[:, :count]
        return out, None

    return attention
