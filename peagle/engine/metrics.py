"""Counters of an engine: what it did, how drafts fared, which form it runs and why."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Metrics:
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompts: found in the prefix cache
    generated_tokens: int = 0
    steps: int = 0
    prefill_passes: int = 0
    drafts: int = 0  # passes of a request that verified drafts
    draft_tokens: int = 0
    accepted_tokens: int = 0
    drafted_at: list[int] = field(default_factory=list)  # per position
    accepted_at: list[int] = field(default_factory=list)
    finished: Counter[str] = field(default_factory=Counter)
    k: int = 0
    nodes: int = 0  # of a chain, as many as K
    k_reason: str = ""
    k_steps: Counter[int] = field(default_factory=Counter)  # how many steps ran with each number of nodes
    step_seconds: float = 0.0
    prefill_seconds: float = 0.0

    def count(self, drafted: int, accepted: int) -> None:
        """One pass of one request."""
        self.drafts += drafted > 0
        self.draft_tokens += drafted
        self.accepted_tokens += accepted
        while len(self.drafted_at) < drafted:
            self.drafted_at.append(0)
            self.accepted_at.append(0)
        for i in range(drafted):
            self.drafted_at[i] += 1
            self.accepted_at[i] += accepted > i

    @property
    def acceptance_length(self) -> float:
        return 1 + self.accepted_tokens / self.drafts if self.drafts else 1.0

    def as_dict(self) -> dict[str, Any]:
        shares = [good / of if of else 0.0 for good, of in zip(self.accepted_at, self.drafted_at, strict=True)]
        told = {name: getattr(self, name) for name in self.__slots__ if name not in ("drafted_at", "accepted_at")}
        told["finished"], told["k_steps"] = dict(self.finished), dict(self.k_steps)
        return told | {
            "acceptance_length": round(self.acceptance_length, 4),
            "accepted_per_position": [round(share, 4) for share in shares],
            "accepted_at": list(self.accepted_at),
            "drafted_at": list(self.drafted_at),
        }
