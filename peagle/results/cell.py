"""A cell: one set, method, K and concurrency, in numbers. The names are those of vLLM's benchmark.

A run is one pass over the set's requests; a cell is the median of its runs. Latencies are of requests that were
answered:

    TTFT   first piece - sent
    TPOT   (last piece - first piece) / (tokens - 1), of answers of two tokens or more
    ITL    the gaps between pieces: with speculation a piece is several tokens
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

from peagle.bench.load.jobs import RequestRecord

LATENCIES = ("ttft", "tpot", "itl")
EXACT = ("set", "method", "k", "concurrency", "tree")


@dataclass(frozen=True, slots=True)
class CellKey:
    set: str
    method: str
    k: int | str  # 0: nothing is drafted; or auto
    concurrency: int
    tree: int = 0  # nodes; 0: a chain; with automatic K the most nodes

    def __str__(self) -> str:
        return f"{self.set} {label(self.method, self.k, self.tree)} c={self.concurrency}"


def label(method: str, k: int | str, tree: int = 0) -> str:
    """Such as none, p-eagle K=7, or p-eagle tree 32, K=7."""
    return f"{method} tree {tree}, K={k}" if tree else f"{method} K={k}" if k else method


@dataclass(slots=True)
class SpecCounters:
    """How drafts fared."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    tried_at: list[int] = field(default_factory=list)  # per position
    accepted_at: list[int] = field(default_factory=list)

    def minus(self, before: "SpecCounters") -> "SpecCounters":
        def apart(now: list[int], then: list[int]) -> list[int]:
            return [a - b for a, b in zip(now, then + [0] * len(now), strict=False)]

        return SpecCounters(
            self.drafts - before.drafts,
            self.draft_tokens - before.draft_tokens,
            self.accepted - before.accepted,
            apart(self.tried_at, before.tried_at),
            apart(self.accepted_at, before.accepted_at),
        )

    def as_dict(self) -> dict[str, Any]:
        """The rate in percent and the rates of positions as shares: as vLLM has them."""
        return {
            "spec_decode_acceptance_rate": 100 * self.accepted / self.draft_tokens
            if self.draft_tokens
            else 0.0,
            "spec_decode_acceptance_length": 1 + self.accepted / self.drafts
            if self.drafts
            else 1.0,
            "spec_decode_num_drafts": self.drafts,
            "spec_decode_draft_tokens": self.draft_tokens,
            "spec_decode_accepted_tokens": self.accepted,
            "spec_decode_per_position_acceptance_rates": [
                good / of if of else 0.0
                for good, of in zip(self.accepted_at, self.tried_at, strict=True)
            ],
        }


NO_SPEC_COUNTERS = dict.fromkeys(SpecCounters().as_dict())


@dataclass(slots=True)
class CellRun:
    """What one pass over the requests of a set gave."""

    records: list[RequestRecord]
    duration: float
    spec: SpecCounters | None = None  # None: nothing is drafted, or nobody tells
    step_ms: float | None = None
    drafter_share: float | None = None  # of the step
    k_steps: dict[int, int] = field(default_factory=dict)
    gpu_memory_bytes: int | None = None
    energy_joules: float | None = None

    @property
    def failed(self) -> list[RequestRecord]:
        return [record for record in self.records if record.error is not None]

    def as_dict(self) -> dict[str, Any]:
        good = [record for record in self.records if record.error is None]
        tokens, seconds = sum(record.tokens for record in good), max(self.duration, 1e-9)
        per_user = [record.tokens / record.seconds for record in good if record.seconds > 0]
        energy = self.energy_joules
        return {
            "requests": len(self.records),
            "failed": len(self.failed),
            "first_error": next((record.error for record in self.failed), None),
            "duration": self.duration,
            "total_output_tokens": tokens,
            "output_throughput": tokens / seconds,
            "request_throughput": len(good) / seconds,
            "per_user_throughput": median(per_user) if per_user else None,
            **latencies(good),
            **(self.spec.as_dict() if self.spec is not None else NO_SPEC_COUNTERS),
            "step_ms": self.step_ms,
            "drafter_share": self.drafter_share,
            "k_steps": {str(k): n for k, n in sorted(self.k_steps.items())},
            "gpu_memory_bytes": self.gpu_memory_bytes,
            "energy_joules": energy,
            "joules_per_token": energy / tokens if energy is not None and tokens else None,
        }


def latencies(records: Iterable[RequestRecord]) -> dict[str, float | None]:
    found: dict[str, list[float]] = {name: [] for name in LATENCIES}
    for record in records:
        times = record.arrivals
        if not times:
            continue
        found["ttft"].append(times[0] - record.start)
        found["itl"] += [b - a for a, b in pairwise(times)]
        if record.tokens > 1:
            found["tpot"].append((times[-1] - times[0]) / (record.tokens - 1))
    told: dict[str, float | None] = {}
    for name, seconds in found.items():
        ms = 1000 * np.array(seconds)
        told[f"mean_{name}_ms"] = float(ms.mean()) if seconds else None
        told[f"median_{name}_ms"] = float(np.median(ms)) if seconds else None
        told[f"p99_{name}_ms"] = float(np.percentile(ms, 99)) if seconds else None
    return told


def cell_of(key: CellKey, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians over the runs; of failures the most, so that no bad run hides."""
    rates = [float(run["output_throughput"]) for run in runs]
    middle = {
        name: middle_of([run[name] for run in runs]) for name in runs[0] if name != "first_error"
    }
    return {
        **asdict(key),
        **middle,
        "failed": max(run["failed"] for run in runs),
        "first_error": next((run["first_error"] for run in runs if run["first_error"]), None),
        "repeats": len(runs),
        "output_throughput_runs": [tidy(rate) for rate in rates],
        "output_throughput_spread": [tidy(min(rates)), tidy(max(rates))],
        "check": None,
    }


def middle_of(values: Sequence[Any]) -> Any:
    """The median of numbers; of lists and dicts, place by place. None where a run has none."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    if isinstance(known[0], dict):
        names = sorted({name for value in known for name in value}, key=int)
        return {name: int(median(value.get(name, 0) for value in known)) for name in names}
    if isinstance(known[0], list):
        longest = max(map(len, known))
        return [middle_of([value[i] for value in known if i < len(value)]) for i in range(longest)]
    middle = median(known)
    return int(middle) if all(isinstance(value, int) for value in known) else tidy(middle)


def tidy(x: float) -> float:
    """Six significant digits."""
    return float(f"{x:.6g}")
