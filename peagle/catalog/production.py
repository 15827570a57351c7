"""Requirements of serving a pair with vLLM, as published. None and empty values mean unknown."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

GB = 1e9


@dataclass(frozen=True, slots=True)
class Memory:
    """GPU memory in bytes, computed from published sizes; None: unknown."""

    weights: int | None = None  # of the target
    position: int | None = None  # keys and values of one position in all layers of the target
    drafter: int | None = None  # weights; None: not published, and not included
    source: str = ""  # of the numbers

    @property
    def weights_gb(self) -> float | None:
        return None if self.weights is None else round((self.weights + (self.drafter or 0)) / GB, 1)

    def need_gb(self, context: int | None, requests: int = 1) -> float | None:
        """GB for the weights and the KV cache of `requests` full contexts.

        None if one of the numbers is unknown.
        """
        if self.weights is None or self.position is None or context is None:
            return None
        kv_bytes = self.position * context * requests
        return round((self.weights + (self.drafter or 0) + kv_bytes) / GB, 1)


@dataclass(frozen=True, slots=True)
class Production:
    vllm: str | None = None  # first version that serves the pair, like "0.18"
    context: int | None = None  # default of --max-model-len
    k: Mapping[int, int] = field(default_factory=dict)  # concurrency -> best K from there on
    flags: Mapping[str, Any] = field(default_factory=dict)  # vLLM options without dashes -> value
    memory: Memory = Memory()
    instances: tuple[str, ...] = ()  # instance types of SageMaker
    jumpstart_id: str | None = None  # "none": JumpStart does not have the pair
    jumpstart_k: int | None = None  # K in JumpStart
    channel: str | None = None  # of the drafter on SageMaker

    @property
    def memory_gb(self) -> float | None:
        """GB for one request of the full context: with less, vLLM does not start."""
        return self.memory.need_gb(self.context)

    def best_k(self, concurrency: int) -> int | None:
        """The K published for the highest concurrency up to this one, else for the lowest.

        None if none was published.
        """
        if not self.k:
            return None
        return self.k[max((c for c in self.k if c <= concurrency), default=min(self.k))]
