"""Verification: the result of `peagle verify`."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from peagle.deploy.verify.endpoint import Evidence

Verdict = Literal["speculating", "not speculating", "unproven"]


@dataclass(slots=True)
class Comparison:
    """Greedy answers with and without drafts."""

    without: str  # where the answers without drafts come from
    compared: int
    equal: int


@dataclass(slots=True)
class Verification:
    endpoint: str
    kind: str
    model: str
    prompts: int
    verdict: Verdict = "unproven"
    evidence: Evidence | None = None
    acceptance_length: float | None = None
    drafts: int | None = None
    draft_tokens: int | None = None
    accepted_tokens: int | None = None
    tokens: int = 0
    tokens_per_second: float = 0.0
    comparison: Comparison | None = None
    cause: str | None = None
    fix: str | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def proven(self) -> bool:
        """The endpoint speculates, and its answers are those without drafts where compared."""
        comparison = self.comparison
        equal = comparison is None or comparison.equal == comparison.compared
        return self.verdict == "speculating" and equal

    def to_json(self) -> dict[str, Any]:
        return {"proven": self.proven} | asdict(self)
