"""The status of engines, summed over several workers."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

# Fields of an engine's status that add up.
SUMMED_FIELDS = (
    "prompt_tokens",
    "cached_tokens",
    "generated_tokens",
    "steps",
    "prefill_passes",
    "drafts",
    "draft_tokens",
    "accepted_tokens",
    "preemptions",
    "waiting",
    "running",
    "prefix_queries",
    "prefix_hits",
    "kv_tokens",
    "step_seconds",
    "prefill_seconds",
)


def sum_statuses(
    worker_engines: Sequence[Mapping[str, Mapping[str, Any]]],
) -> dict[str, dict[str, Any]]:
    """Sum the engines of several workers: of each worker, the status of its engines by name."""
    names = dict.fromkeys(name for engines in worker_engines for name in engines)
    return {
        name: sum_engines([engines[name] for engines in worker_engines if name in engines])
        for name in names
    }


def sum_engines(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sum engines of one method; fields that do not add up, like K, are the busiest engine's."""
    busiest = max(parts, key=lambda part: part["running"])
    total = dict(busiest) | {key: sum(part[key] for part in parts) for key in SUMMED_FIELDS}
    for key in ("accepted_at", "drafted_at"):  # counts by position
        columns = zip_longest(*(part[key] for part in parts), fillvalue=0)
        total[key] = [sum(column) for column in columns]
    for key in ("finished", "k_steps"):  # counts by name
        total[key] = dict(sum((Counter(part[key]) for part in parts), Counter()))
    used_tokens = sum(part["kv_usage"] * part["kv_tokens"] for part in parts)
    total["kv_usage"] = used_tokens / total["kv_tokens"] if total["kv_tokens"] else 0.0
    return total | acceptance_fields(
        total["drafts"], total["accepted_tokens"], total["accepted_at"], total["drafted_at"]
    )


def acceptance_fields(
    drafts: float,
    accepted_tokens: float,
    accepted_at: Sequence[float],
    drafted_at: Sequence[float],
) -> dict[str, Any]:
    """`accepted_at` and `drafted_at` count tokens by position in the draft."""
    rates = [
        round(accepted / drafted, 4) if drafted else 0.0
        for accepted, drafted in zip(accepted_at, drafted_at, strict=True)
    ]
    return {
        "acceptance_length": round(1 + accepted_tokens / drafts, 4) if drafts else 1.0,
        "accepted_per_position": rates,
    }
