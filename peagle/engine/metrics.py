"""Counters of an engine: what it did, how drafts fared, which form it runs and why."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

DERIVED = ("drafts", "draft_tokens", "accepted_tokens", "accepted_at", "drafted_at")


@dataclass(slots=True)
class Metrics:
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompts: found in the prefix cache
    generated_tokens: int = 0
    steps: int = 0
    prefill_passes: int = 0
    fared: Counter[tuple[int, int]] = field(default_factory=Counter)  # passes of a request, by drafted and accepted
    finished: Counter[str] = field(default_factory=Counter)
    k: int = 0
    nodes: int = 0  # of a chain, as many as K
    k_reason: str = ""
    k_steps: Counter[int] = field(default_factory=Counter)  # how many steps ran with each number of nodes
    step_seconds: float = 0.0
    prefill_seconds: float = 0.0

    @property
    def drafts(self) -> int:
        """Passes of a request that verified drafts."""
        return sum(passes for (drafted, _), passes in self.fared.items() if drafted)

    @property
    def draft_tokens(self) -> int:
        return sum(passes * drafted for (drafted, _), passes in self.fared.items())

    @property
    def accepted_tokens(self) -> int:
        return sum(passes * accepted for (_, accepted), passes in self.fared.items())

    @property
    def drafted_at(self) -> list[int]:
        """Per position."""
        return [sum(n for (drafted, _), n in self.fared.items() if drafted > i) for i in range(self._deepest)]

    @property
    def accepted_at(self) -> list[int]:
        return [sum(n for pair, n in self.fared.items() if min(pair) > i) for i in range(self._deepest)]

    @property
    def _deepest(self) -> int:
        return max((drafted for drafted, _ in self.fared), default=0)

    @property
    def acceptance_length(self) -> float:
        return 1 + self.accepted_tokens / self.drafts if self.drafts else 1.0

    def as_dict(self) -> dict[str, Any]:
        told = {name: getattr(self, name) for name in (*self.__slots__, *DERIVED) if name != "fared"}
        shares = [good / of if of else 0.0 for good, of in zip(told["accepted_at"], told["drafted_at"], strict=True)]
        told["finished"], told["k_steps"] = dict(self.finished), dict(self.k_steps)
        return told | {
            "acceptance_length": round(self.acceptance_length, 4),
            "accepted_per_position": [round(share, 4) for share in shares],
        }
