"""Any transformers architecture over a paged KV cache, through transformers' attention interface.

The model computes what it always does; only its attention function is replaced by one that reads
and writes pages. On a CPU that runs the model's own attention function, request by request, with a
mask for the sliding window. On a GPU it is the paged kernel, which supports sliding windows, soft
caps and sinks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from peagle.engine.kv.kv_cache import KVCache
from peagle.engine.model.attention import query_blocks
from peagle.engine.model.paged_limits import disable_temperature_tuning
from peagle.engine.model.weight import Weight
from peagle.errors import UserError
from peagle.kernels.attention_params import AttentionParams
from peagle.kernels.row_pass import RowPass
from peagle.kernels.triton.attention.paged_attention import paged_attention
from peagle.target import Target
from peagle.target.gguf.modules import StoredLinear
from peagle.target.hf_attention import hf_attention
from peagle.target.residual_taps import ResidualTaps
from peagle.target.target import decoder_layers

PREFIX = "peagle_paged_"  # of the names under which paged attention is registered

# Called with the layer, its query [1, heads, T, d] and the arguments of its attention function.
AttentionHook = Callable[[int, Tensor, dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class LocalMask:
    """The mask of a sliding window. A causal mask is None."""

    window: int


@dataclass(frozen=True, slots=True)
class PagedContext:
    """What the model passes through to its attention function: one argument of the forward call."""

    rows: RowPass
    kv_cache: KVCache
    windows: dict[int, int | None]  # by layer, filled by attention
    on_attention: AttentionHook | None = None


class PackedLinear(nn.Module):
    """A linear layer of a model that multiplies with a Weight of the engine."""

    def __init__(self, weight: Weight) -> None:
        super().__init__()
        self.packed_weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return self.packed_weight(x.flatten(0, -2)).unflatten(0, x.shape[:-1])


class HFPagedTarget:
    """Runs the target's own modules, except that their attention reads and writes pages.

    The modules are a copy that shares the target's tensors: its attention function and its taps
    belong to this engine alone.
    """

    def __init__(self, target: Target) -> None:
        self.name = target.name
        self.model: Any = target.private_model()
        self.layers = decoder_layers(self.model)
        self._install_attention()
        disable_temperature_tuning(self.model)
        self._taps = ResidualTaps(self.layers, ())
        # Rows of drafts may lie beyond the context. They are never accepted, but a table of learned
        # positions has no entry for them.
        self.last_position = target.context - 1
        # The sliding window of each layer, as it passes it to attention; filled by a pass.
        self.windows: dict[int, int | None] = {}
        self.on_attention: AttentionHook | None = None

    @property
    def taps(self) -> tuple[int, ...]:
        return self._taps.ids

    @taps.setter
    def taps(self, ids: tuple[int, ...]) -> None:
        self._taps.remove()
        self._taps = ResidualTaps(self.layers, ids)

    @property
    def is_stored(self) -> bool:
        """Whether all linear layers of a GGUF file are multiplied as stored."""
        packed = [x for x in self.model.modules() if isinstance(x, PackedLinear)]
        return bool(packed) and all(x.packed_weight.is_stored for x in packed)

    def pack_stored(self, dtype: torch.dtype) -> None:
        """Multiply with the weights of a GGUF file as the fused layers do.

        The target's own modules would widen them in every pass.
        """
        for name, module in list(self.model.named_modules()):
            if isinstance(module, StoredLinear):
                weight = Weight(module.weight, module.bias, dtype=dtype)
                self.model.set_submodule(name, PackedLinear(weight))

    def forward(
        self, ids: Tensor, rows: RowPass, kv_cache: KVCache, logit_rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `Verifier.forward`."""
        try:
            out = self.model(
                input_ids=ids[None],
                position_ids=rows.positions[None].long().clamp(max=self.last_position),
                use_cache=False,
                logits_to_keep=0 if logit_rows is None else logit_rows,
                paged=PagedContext(rows, kv_cache, self.windows, self.on_attention),
            )
            taps = self._taps.take()
        finally:
            self._taps.clear()
        if len(self.windows) < len(self.layers):
            raise self._unsupported()  # Some layer does not call the function that was installed.
        return out.logits[0], torch.cat(taps, -1)[0] if taps else out.logits.new_empty(len(ids), 0)

    def _install_attention(self) -> None:
        config = self.model.config
        paged_name = register_paged_attention(config._attn_implementation)
        self.model.set_attn_implementation(paged_name)
        if config._attn_implementation != paged_name:
            raise self._unsupported()

    def _unsupported(self) -> UserError:
        return UserError(
            f"target {self.name!r} is not supported: transformers cannot replace its attention,"
            " which the paged KV cache needs"
        )


def register_paged_attention(own_name: str) -> str:
    """Make paged attention known to transformers; returns its name there.

    `own_name`: the attention function that it runs on a CPU.
    """
    paged_name = f"{PREFIX}{own_name}"
    if paged_name not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(paged_name, make_paged_attention(own_name))
        ALL_MASK_ATTENTION_FUNCTIONS.register(paged_name, paged_mask)
    return paged_name


def paged_mask(*args: Any, local_size: int | None = None, **kwargs: Any) -> LocalMask | None:
    """What layers pass to attention as their mask; `local_size`: the sliding window, if any."""
    return None if local_size is None else LocalMask(local_size)


def make_paged_attention(own_name: str) -> Callable[..., tuple[Tensor, Any]]:
    """An attention function for transformers; `own_name` names the one it runs on a CPU."""

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: LocalMask | None,
        paged: PagedContext | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """query [1, heads, T, d], key and value [1, kv_heads, T, d] -> [1, T, heads, d]."""
        if paged is None:
            raise UserError(
                f"{type(module).__name__} does not pass arguments on to its attention function,"
                " which the paged KV cache needs: use another target"
            )
        layer: Any = module.layer_idx
        keys, values = (x[0].transpose(0, 1) for x in (key, value))
        paged.kv_cache.store(layer, paged.rows.kv_slots, keys, values)
        window = kwargs.get("sliding_window")
        if window is None and attention_mask is not None:
            window = attention_mask.window  # Some models (Phi-MoE) state it in the mask only.
        paged.windows[layer] = window
        if paged.on_attention is not None:
            paged.on_attention(layer, query, kwargs)
        if query.is_cuda and kwargs.get("position_bias") is None:
            return attend_on_gpu(query, layer, paged, kwargs), None
        run = hf_attention(own_name, module)
        return attend_by_blocks(run, module, query, paged, kwargs), None

    return attention


def attend_on_gpu(query: Tensor, layer: int, paged: PagedContext, kwargs: dict[str, Any]) -> Tensor:
    """query [1, heads, T, d] -> [1, T, heads, d], by the paged kernel."""
    params = AttentionParams(
        kwargs.get("scaling") or query.shape[-1] ** -0.5,
        window=paged.windows[layer],
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
    )
    out = paged_attention(
        query[0].transpose(0, 1),
        paged.kv_cache.keys[layer],
        paged.kv_cache.values[layer],
        paged.rows,
        params,
        split_counters=paged.kv_cache.arrived,
    )
    return out[None]


def attend_by_blocks(
    run: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    paged: PagedContext,
    kwargs: dict[str, Any],
) -> Tensor:
    """query [1, heads, T, d] -> [1, T, heads, d], by `run` on each block of rows."""
    rows = paged.rows
    layer: Any = module.layer_idx
    out = torch.zeros_like(query).transpose(1, 2).contiguous()
    caches = (paged.kv_cache.keys[layer], paged.kv_cache.values[layer])
    for block in query_blocks(rows, paged.windows[layer], 1, query.dtype):
        count = block.end - block.start
        k, v = (block.read(cache, rows).transpose(0, 1)[None] for cache in caches)
        q = pad(query[:, :, block.start : block.end], (0, 0, 0, len(block.mask) - count))
        attended = run(module, q, k, v, block.mask[None, None], **kwargs)[0]
        out[:, block.start : block.end] = attended[:, :count]
    return out
