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
    fared: Counter[tuple[int, int]] = field(
        default_factory=Counter
    )  # passes of a request by drafted, accepted
    finished: Counter[str] = field(default_factory=Counter)
    k: int = 0
    nodes: int = 0  # of a chain, as many as K
    k_reason: str = ""
    k_steps: Counter[int] = field(
        default_factory=Counter
    )  # how many steps ran with each number of nodes
    step_seconds: float = 0.0
    prefill_seconds: float = 0.0

    @property
    def passes(self) -> list[tuple[int, int, int]]:
        """Drafted, accepted, how often. A copy at one moment: the engine's thread goes on counting."""
        return [
            (drafted, accepted, count) for (drafted, accepted), count in list(self.fared.items())
        ]

    @property
    def drafts(self) -> int:
        """Passes of a request that verified drafts."""
        return sum(count for drafted, _, count in self.passes if drafted)

    @property
    def draft_tokens(self) -> int:
        return sum(count * drafted for drafted, _, count in self.passes)

    @property
    def accepted_tokens(self) -> int:
        return sum(count * accepted for _, accepted, count in self.passes)

    @property
    def drafted_at(self) -> list[int]:
        """Per position."""
        return self._at([(drafted, count) for drafted, _, count in self.passes])

    @property
    def accepted_at(self) -> list[int]:
        return self._at(
            [(min(drafted, accepted), count) for drafted, accepted, count in self.passes]
        )

    def _at(self, reached: list[tuple[int, int]]) -> list[int]:
        """Of each position that was ever drafted: how many reached beyond it."""
        deepest = max((drafted for drafted, _, _ in self.passes), default=0)
        return [sum(count for depth, count in reached if depth > i) for i in range(deepest)]

    @property
    def acceptance_length(self) -> float:
        return 1 + self.accepted_tokens / self.drafts if self.drafts else 1.0

    def as_dict(self) -> dict[str, Any]:
        told = {
            name: getattr(self, name) for name in (*self.__slots__, *DERIVED) if name != "fared"
        }
        shares = [
            good / of if of else 0.0
            for good, of in zip(told["accepted_at"], told["drafted_at"], strict=True)
        ]
        told["finished"], told["k_steps"] = dict(self.finished), dict(self.k_steps)
        return told | {
            "acceptance_length": round(self.acceptance_length, 4),
            "accepted_per_position": [round(share, 4) for share in shares],
        }
