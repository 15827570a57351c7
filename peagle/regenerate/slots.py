"""A KV cache of slots, and the attention that reads it: each slot holds one request, of its own length.

    keys, values  [slots, kv_heads, capacity, head_dim] per layer
    lengths       [slots]: how many positions of a slot are filled; the next token is written there

A prefill stores the prompts of some slots from position 0 on; a decode step adds one position to every slot. Lengths
stay on the device, so that a whole step can be captured in a CUDA graph. Sliding layers keep all positions too: their
window is applied when they are read.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from peagle.errors import UserError
from peagle.target import Target
from peagle.target.hf_attention import hf_attention

PREFIX = "peagle_slots_"


class SlotLayer(DynamicLayer):
    def __init__(self, cache: "SlotCache") -> None:
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = self._room(key_states), self._room(value_states)
        self.is_initialized = True

    def _room(self, like: Tensor) -> Tensor:  # zeros: what is masked is still multiplied
        return like.new_zeros(
            len(self.cache.rows), like.shape[1], self.cache.capacity, like.shape[3]
        )

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """A prefill attends to what it brings; a decode step to all that its slots hold."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        cache = self.cache
        if cache.filling is not None:
            end = key_states.shape[2]
            self.keys[cache.filling, :, :end] = key_states
            self.values[cache.filling, :, :end] = value_states
            return key_states, value_states
        self.keys[cache.rows, :, cache.lengths] = key_states[:, :, 0]
        self.values[cache.rows, :, cache.lengths] = value_states[:, :, 0]
        return self.keys[:, :, : cache.end], self.values[:, :, : cache.end]

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0


class SlotCache(Cache):
    def __init__(self, layers: int, slots: int, capacity: int, device: torch.device) -> None:
        self.capacity = capacity
        self.rows = torch.arange(slots, device=device)
        self.lengths = torch.zeros(slots, dtype=torch.long, device=device)
        self.filling: Tensor | None = None  # the slots a prefill stores into, [group]
        self.end = capacity  # a bound on the lengths, where the host knows a smaller one
        super().__init__(layers=[SlotLayer(self) for _ in range(layers)])


@contextmanager
def slot_attention(target: Target) -> Iterator[None]:
    """While the block runs, the target reads a SlotCache; only prefills and decode steps of one may run it then."""
    plain: Any = target.model.config._attn_implementation
    name = f"{PREFIX}{plain}"
    if name not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(name, _attention(plain))
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, _mask(ALL_MASK_ATTENTION_FUNCTIONS[plain]))
    target.model.set_attn_implementation(name)
    if target.model.config._attn_implementation != name:
        raise UserError(
            f"target {target.name!r} cannot answer in batches: its attention cannot be exchanged"
        )
    try:
        yield
    finally:
        target.model.set_attn_implementation(plain)


def _mask(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A prefill is plainly causal: its padding is on the right, where no real token sees it."""

    def mask(*args: Any, **kwargs: Any) -> Any:
        rows = kwargs.get("q_length", args[1] if len(args) > 1 else 0)
        return None if rows == 1 else plain(*args, **kwargs)

    return mask


def _attention(plain: str) -> Callable[..., tuple[Tensor, Any]]:
    """transformers' attention `plain`; with `slot_lengths`, of one token per slot over the keys of its slot."""

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        slot_lengths: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        if slot_lengths is not None:
            if _kernel_fits(query, kwargs):
                from peagle.kernels.triton.decode_attention import decode_attention

                scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
                return decode_attention(query[:, :, 0], key, value, slot_lengths, scale)[
                    :, None
                ], None
            attention_mask = decode_mask(
                slot_lengths, key.shape[2], kwargs.get("sliding_window"), query.dtype
            )
        return hf_attention(plain, module)(module, query, key, value, attention_mask, **kwargs)

    return attention


def _kernel_fits(query: Tensor, how: dict[str, Any]) -> bool:
    """On CUDA, where nothing but the keys and the scale matters."""
    extras = ("sliding_window", "softcap", "s_aux", "position_bias")
    if query.device.type != "cuda" or any(how.get(name) is not None for name in extras):
        return False
    from peagle.kernels.triton.decode_attention import available

    return available()


def decode_mask(lengths: Tensor, keys: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """[slots, 1, 1, keys], to be added: the token at position lengths[s] sees the last `window` keys up to itself."""
    at = torch.arange(keys, device=lengths.device)
    seen = at <= lengths[:, None]
    if window is not None:
        seen &= at > lengths[:, None] - window
    return torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype)[:, None, None]
