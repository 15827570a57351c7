"""A KV cache with rollback: positions of rejected drafts are dropped.

It serves models of transformers (as `past_key_values`) and the drafter. Every layer stores all
positions, also layers with a sliding window: the attention mask applies the window, so a rollback
never needs an evicted entry.
"""

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

INITIAL_CAPACITY = 256  # positions


class RollbackLayer(DynamicLayer):
    """Keys and values [1, heads, capacity, head_dim]; the first `length` positions are valid."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype = key_states.dtype
        self.device = key_states.device
        self.keys = _allocate(key_states, INITIAL_CAPACITY)
        self.values = _allocate(value_states, INITIAL_CAPACITY)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append new positions; return the keys and values of all positions."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        end = self.length + key_states.shape[-2]
        if end > self.keys.shape[-2]:
            self.keys = _grow(self.keys, self.length, end)
            self.values = _grow(self.values, self.length, end)
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        return self.length


class RollbackCache(Cache):
    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[RollbackLayer() for _ in range(num_layers)])

    @property
    def length(self) -> int:
        return self.get_seq_length()

    def rollback(self, length: int) -> None:
        """Keep only the first `length` positions."""
        assert 0 <= length <= self.length, f"cannot roll back from {self.length} to {length}"
        for layer in self.layers:
            assert isinstance(layer, RollbackLayer)
            layer.length = length


def _allocate(like: Tensor, capacity: int) -> Tensor:
    return like.new_empty(*like.shape[:-2], capacity, like.shape[-1])


def _grow(old: Tensor, length: int, required: int) -> Tensor:
    """Double the capacity, so that few steps copy the cache."""
    new = _allocate(old, max(required, 2 * old.shape[-2]))
    new[:, :, :length] = old[:, :, :length]
    return new
