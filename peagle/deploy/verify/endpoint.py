"""Endpoint: what `verify` asks of a server, whatever it runs on."""

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

from peagle.deploy.verify.answer import Answer
from peagle.results.spec_counters import SpecCounters

Evidence = Literal["answers", "metrics", "logs", "configuration"]


class Observation(NamedTuple):
    """What a server counted, beside its answers."""

    evidence: Evidence
    spec: SpecCounters | None  # None: the server counts no drafts, so it has no drafter


class Cause(NamedTuple):
    cause: str
    fix: str


Observe = Callable[[], Observation | None]  # None: nothing is known


class Endpoint(Protocol):
    kind: str
    model: str
    name: str
    evidence_fix: str  # what makes the drafts visible where they are not

    @property
    def has_switch(self) -> bool:
        """A request can be answered without drafts."""
        ...

    def ask(self, prompt: str, max_tokens: int, drafts: bool = True) -> Answer: ...

    def watch(self) -> Observe:
        """Start to count; the result is called after the last answer."""
        ...

    def explain(self, has_counters: bool) -> Cause:
        """Why no drafts are made. `has_counters`: the server counts drafts, but made none."""
        ...
