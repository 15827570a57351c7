"""A KV cache that can be rolled back: what the target verified and did not keep is forgotten.

It serves transformers' models (as `past_key_values`) and the drafter alike. Every layer keeps all positions, sliding
ones too: their window is applied by the attention mask, so a rollback never needs an entry that was evicted.
"""

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

FIRST_CAPACITY = 256


class RollbackLayer(DynamicLayer):
    """Keys and values [1, heads, capacity, head_dim]; the first `length` positions are valid."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = (
            _room(key_states, FIRST_CAPACITY),
            _room(value_states, FIRST_CAPACITY),
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        end = self.length + key_states.shape[-2]
        if end > self.keys.shape[-2]:
            self.keys, self.values = (
                _grown(self.keys, self.length, end),
                _grown(self.values, self.length, end),
            )
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        return self.length


class RollbackCache(Cache):
    def __init__(self, layers: int) -> None:
        super().__init__(layers=[RollbackLayer() for _ in range(layers)])

    @property
    def length(self) -> int:
        return self.get_seq_length()

    def rollback(self, length: int) -> None:
        """Keeps the first `length` positions."""
        assert 0 <= length <= self.length, f"cannot roll back from {self.length} to {length}"
        for layer in self.layers:
            assert isinstance(layer, RollbackLayer)
            layer.length = length


def _room(like: Tensor, capacity: int) -> Tensor:
    return like.new_empty(*like.shape[:-2], capacity, like.shape[-1])


def _grown(old: Tensor, length: int, needed: int) -> Tensor:
    """Doubling keeps the copies amortised: no step copies the whole cache."""
    new = _room(old, max(needed, 2 * old.shape[-2]))
    new[:, :, :length] = old[:, :, :length]
    return new
