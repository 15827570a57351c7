"""Metrics: the counters of an engine."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from peagle.engine.policy.draft_policy import DraftChoice

DERIVED = ("drafts", "draft_tokens", "accepted_tokens", "accepted_at", "drafted_at")


@dataclass(slots=True)
class Metrics:
    prompt_tokens: int = 0
    cached_tokens: int = 0  # Prompt tokens found in the prefix cache.
    generated_tokens: int = 0
    steps: int = 0
    prefill_passes: int = 0
    # Decode passes of one request, by drafted and accepted tokens.
    pass_counts: Counter[tuple[int, int]] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)  # Requests by finish reason.
    # The draft shape of the last step; a chain has K nodes.
    k: int = 0
    nodes: int = 0
    k_reason: str = ""
    k_steps: Counter[int] = field(default_factory=Counter)  # Steps by number of nodes.
    step_seconds: float = 0.0
    prefill_seconds: float = 0.0

    def show_choice(self, choice: DraftChoice) -> None:
        """Keep what a policy chose for the last step, and why."""
        self.k = choice.shape.k
        self.nodes = choice.shape.nodes
        self.k_reason = choice.reason

    @property
    def passes(self) -> list[tuple[int, int, int]]:
        """(drafted, accepted, count): a snapshot, as the engine's thread goes on counting."""
        counts = list(self.pass_counts.items())
        return [(drafted, accepted, count) for (drafted, accepted), count in counts]

    @property
    def drafts(self) -> int:
        """Passes of one request that verified drafts."""
        return sum(count for drafted, _, count in self.passes if drafted)

    @property
    def draft_tokens(self) -> int:
        return sum(count * drafted for drafted, _, count in self.passes)

    @property
    def accepted_tokens(self) -> int:
        return sum(count * accepted for _, accepted, count in self.passes)

    @property
    def drafted_at(self) -> list[int]:
        """Drafted tokens by position."""
        return self._count_positions([(drafted, count) for drafted, _, count in self.passes])

    @property
    def accepted_at(self) -> list[int]:
        """Accepted tokens by position."""
        return self._count_positions(
            [(min(drafted, accepted), count) for drafted, accepted, count in self.passes]
        )

    def _count_positions(self, depths: list[tuple[int, int]]) -> list[int]:
        """For each position that was ever drafted: the passes with a larger depth."""
        max_depth = max((drafted for drafted, _, _ in self.passes), default=0)
        return [sum(count for depth, count in depths if depth > i) for i in range(max_depth)]

    @property
    def acceptance_length(self) -> float:
        """Tokens per pass that verified drafts, the bonus token included."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else 1.0

    def as_dict(self) -> dict[str, Any]:
        """All counters by name, for JSON and for /metrics."""
        names = [name for name in (*self.__slots__, *DERIVED) if name != "pass_counts"]
        counters = {name: getattr(self, name) for name in names}
        rates = [
            accepted / drafted if drafted else 0.0
            for accepted, drafted in zip(
                counters["accepted_at"], counters["drafted_at"], strict=True
            )
        ]
        counters["finished"] = dict(self.finished)
        counters["k_steps"] = dict(self.k_steps)
        return counters | {
            "acceptance_length": round(self.acceptance_length, 4),
            "accepted_per_position": [round(rate, 4) for rate in rates],
        }
