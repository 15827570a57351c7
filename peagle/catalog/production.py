"""What it takes to serve a pair with vLLM, and what was published about it. None and empty mean: unknown."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

GB = 1e9


@dataclass(frozen=True, slots=True)
class Memory:
    """What the GPUs must hold, from published sizes: `source` says which. Numbers of bytes; None: unknown."""

    weights: int | None = None  # the target's
    position: int | None = None  # keys and values of one position, all layers of the target
    drafter: int | None = None  # weights; None: not published, and not counted
    source: str = ""

    @property
    def weights_gb(self) -> float | None:
        return None if self.weights is None else round((self.weights + (self.drafter or 0)) / GB, 1)

    def need_gb(self, context: int | None, requests: int = 1) -> float | None:
        """GB for the weights and the keys and values of `requests` full contexts; None where a part is unknown."""
        if self.weights is None or self.position is None or context is None:
            return None
        return round(
            (self.weights + (self.drafter or 0) + self.position * context * requests) / GB, 1
        )


@dataclass(frozen=True, slots=True)
class Production:
    vllm: str | None = None  # the first version that serves the pair, "0.18"
    context: int | None = None  # --max-model-len, unless told otherwise
    k: Mapping[int, int] = field(
        default_factory=dict
    )  # the best K from this concurrency on, as published
    flags: Mapping[str, Any] = field(
        default_factory=dict
    )  # vLLM's options without their dashes: value, or true
    memory: Memory = Memory()
    instances: tuple[str, ...] = ()  # SageMaker's types
    jumpstart_id: str | None = None  # "none": JumpStart does not have it
    jumpstart_k: int | None = None  # the K JumpStart ships
    channel: str | None = None  # of the drafter, on SageMaker

    @property
    def memory_gb(self) -> float | None:
        """What one request of the full context needs: less, and vLLM does not start."""
        return self.memory.need_gb(self.context)

    def best_k(self, concurrency: int) -> int | None:
        """As published for the nearest load that is no higher, else the lowest; None: nothing was."""
        if not self.k:
            return None
        return self.k[max((c for c in self.k if c <= concurrency), default=min(self.k))]
