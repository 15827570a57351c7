"""SpecCounters: how many drafts a load verified and accepted."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class SpecCounters:
    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    tried_at: list[int] = field(default_factory=list)  # drafts that reached each position
    accepted_at: list[int] = field(default_factory=list)  # drafts accepted at each position

    def minus(self, before: "SpecCounters") -> "SpecCounters":
        return SpecCounters(
            self.drafts - before.drafts,
            self.draft_tokens - before.draft_tokens,
            self.accepted - before.accepted,
            difference(self.tried_at, before.tried_at),
            difference(self.accepted_at, before.accepted_at),
        )

    @property
    def acceptance_rate(self) -> float:
        """Percent of the drafted tokens, the unit that vLLM uses."""
        return 100 * self.accepted / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def acceptance_length(self) -> float:
        return 1 + self.accepted / self.drafts if self.drafts else 1.0

    @property
    def position_rates(self) -> tuple[float, ...]:
        """The share of drafts accepted at each position, in 0..1."""
        return tuple(
            accepted / tried if tried else 0.0
            for accepted, tried in zip(self.accepted_at, self.tried_at, strict=True)
        )


def difference(after: list[int], before: list[int]) -> list[int]:
    """Item by item; `before` may be shorter."""
    padded = before + [0] * len(after)
    return [a - b for a, b in zip(after, padded, strict=False)]
