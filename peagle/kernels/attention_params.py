"""What an attention layer adds to the rows of a pass: its heads, its scale and its variants."""

from dataclasses import dataclass

from torch import Tensor

UNLIMITED_WINDOW = 1 << 30  # larger than any position


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """The heads of a merged qkv projection, and their norms where a model has them (Qwen3)."""

    num_heads: int
    num_kv_heads: int
    q_norm: Tensor | None = None  # [d] RMSNorm weight of the query heads
    k_norm: Tensor | None = None  # [d] RMSNorm weight of the key heads
    eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class AttentionParams:
    scale: float  # multiplies query-key products
    window: int | None = None  # a row attends to the last `window` positions, its own included
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    sinks: Tensor | None = None  # [heads]: one more score per head, without a value
    batch_invariant: bool = False  # Sum in an order that the position of a row alone decides.

    @property
    def window_size(self) -> int:
        return UNLIMITED_WINDOW if self.window is None else self.window
