"""CellRun: one pass over the requests of a set, and the metrics of it.

Latencies are those of the requests that were answered:

    TTFT   first chunk - sent
    TPOT   (last chunk - first chunk) / (tokens - 1), for answers of two tokens or more
    ITL    the gaps between chunks; with speculation a chunk holds several tokens
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

from peagle.results.metrics import RunMetrics
from peagle.results.request_record import RequestRecord
from peagle.results.spec_counters import SpecCounters


@dataclass(slots=True)
class CellRun:
    records: list[RequestRecord]
    duration: float  # seconds
    spec: SpecCounters | None = None  # None without drafts, and where a server reports none
    step_ms: float | None = None
    drafter_share: float | None = None  # of a step's time
    k_steps: dict[int, int] = field(default_factory=dict)
    gpu_memory_bytes: int | None = None
    energy_joules: float | None = None
    exact_mode: str | None = None  # of peagle's engine: batched, one by one or off

    @property
    def failed(self) -> list[RequestRecord]:
        return [record for record in self.records if record.error is not None]

    def metrics(self) -> RunMetrics:
        answered = [record for record in self.records if record.error is None]
        tokens = sum(record.tokens for record in answered)
        seconds = max(self.duration, 1e-9)
        user_rates = [record.tokens / record.seconds for record in answered if record.seconds > 0]
        energy = self.energy_joules
        return RunMetrics(
            requests=len(self.records),
            failed=len(self.failed),
            first_error=next((record.error for record in self.failed), None),
            duration=self.duration,
            total_output_tokens=tokens,
            output_throughput=tokens / seconds,
            request_throughput=len(answered) / seconds,
            per_user_throughput=median(user_rates) if user_rates else None,
            **latencies(answered),
            **spec_metrics(self.spec),
            step_ms=self.step_ms,
            drafter_share=self.drafter_share,
            k_steps=dict(sorted(self.k_steps.items())),
            gpu_memory_bytes=self.gpu_memory_bytes,
            energy_joules=energy,
            joules_per_token=energy / tokens if energy is not None and tokens else None,
            exact_mode=self.exact_mode,
        )


def spec_metrics(spec: SpecCounters | None) -> dict[str, Any]:
    if spec is None:
        return {}
    return {
        "spec_decode_acceptance_rate": spec.acceptance_rate,
        "spec_decode_acceptance_length": spec.acceptance_length,
        "spec_decode_num_drafts": spec.drafts,
        "spec_decode_draft_tokens": spec.draft_tokens,
        "spec_decode_accepted_tokens": spec.accepted,
        "spec_decode_per_position_acceptance_rates": spec.position_rates,
    }


def latencies(records: Iterable[RequestRecord]) -> dict[str, Any]:
    """Mean, median and 99th percentile of each latency, in milliseconds."""
    samples: dict[str, list[float]] = {"ttft": [], "tpot": [], "itl": []}
    for record in records:
        times = record.arrivals
        if not times:
            continue
        samples["ttft"].append(times[0] - record.start)
        samples["itl"] += [b - a for a, b in pairwise(times)]
        if record.tokens > 1:
            samples["tpot"].append((times[-1] - times[0]) / (record.tokens - 1))
    metrics: dict[str, Any] = {}
    for name, seconds in samples.items():
        if not seconds:
            continue
        ms = 1000 * np.array(seconds)
        metrics[f"mean_{name}_ms"] = float(ms.mean())
        metrics[f"median_{name}_ms"] = float(np.median(ms))
        metrics[f"p99_{name}_ms"] = float(np.percentile(ms, 99))
    return metrics
