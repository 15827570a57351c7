"""RunMetrics: the numbers of one run of a cell. The field names are those of vLLM's benchmark."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from peagle.results.json_values import as_counts, as_float, as_floats, as_int, as_text

PARSERS: dict[Any, Any] = {
    int | None: as_int,
    float | None: as_float,
    str | None: as_text,
    tuple[float, ...] | None: as_floats,
    Mapping[int, int]: as_counts,
}

NAMED_IF_KNOWN = ("exact_mode",)  # newer fields


@dataclass(frozen=True, kw_only=True)
class RunMetrics:
    """Latencies and rates are None where nothing was answered, drafted or counted.

    A file may lack any of them. The order of the fields is their order in the file.
    """

    requests: int | None = None
    failed: int | None = None
    first_error: str | None = None
    duration: float | None = None  # seconds
    total_output_tokens: int | None = None
    output_throughput: float | None = None  # tokens/s of all users together
    request_throughput: float | None = None  # requests/s
    per_user_throughput: float | None = None  # tokens/s of one user, the median
    mean_ttft_ms: float | None = None
    median_ttft_ms: float | None = None
    p99_ttft_ms: float | None = None
    mean_tpot_ms: float | None = None
    median_tpot_ms: float | None = None
    p99_tpot_ms: float | None = None
    mean_itl_ms: float | None = None
    median_itl_ms: float | None = None
    p99_itl_ms: float | None = None
    spec_decode_acceptance_rate: float | None = None  # percent
    spec_decode_acceptance_length: float | None = None
    spec_decode_num_drafts: int | None = None
    spec_decode_draft_tokens: int | None = None
    spec_decode_accepted_tokens: int | None = None
    spec_decode_per_position_acceptance_rates: tuple[float, ...] | None = None  # in 0..1
    step_ms: float | None = None
    drafter_share: float | None = None  # of a step's time
    k_steps: Mapping[int, int] = field(default_factory=dict)  # drafted tokens -> number of steps
    gpu_memory_bytes: int | None = None
    energy_joules: float | None = None
    joules_per_token: float | None = None
    # batched, one by one or off; None: an endpoint, or a file of an older version
    exact_mode: str | None = None

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Self:
        return cls(**parse_metrics(raw))

    def to_json(self) -> dict[str, Any]:
        """Newer fields are left out where they are None, so that older files stay as they are."""
        return {
            f.name: json_value(getattr(self, f.name))
            for f in METRIC_FIELDS
            if f.name not in NAMED_IF_KNOWN or getattr(self, f.name) is not None
        }


METRIC_FIELDS = fields(RunMetrics)


def parse_metrics(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Every field of RunMetrics, from the JSON object of a run or of a cell."""
    return {f.name: PARSERS[f.type](raw.get(f.name)) for f in METRIC_FIELDS}


def json_value(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, Mapping):
        return {str(key): count for key, count in value.items()}
    return value
