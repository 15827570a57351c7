"""What the engines of several workers say of themselves, added up; and the same told by a page of vLLM's metrics."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

SUMS = (
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
FROM_VLLM = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generated_tokens",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:prefix_cache_hits_total": "prefix_hits",
    "vllm:spec_decode_num_drafts_total": "drafts",
    "vllm:spec_decode_num_draft_tokens_total": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted_tokens",
}


def added(statuses: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """By engine's name; each worker tells a status of each of its engines."""
    names = dict.fromkeys(name for engines in statuses for name in engines)
    return {
        name: total([engines[name] for engines in statuses if name in engines]) for name in names
    }


def total(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of engines of one kind. K is the busiest one's; what they have in common is told once."""
    busiest = max(parts, key=lambda part: part["running"])
    told = dict(busiest) | {key: sum(part[key] for part in parts) for key in SUMS}
    for key in ("accepted_at", "drafted_at"):
        told[key] = [
            sum(column) for column in zip_longest(*(part[key] for part in parts), fillvalue=0)
        ]
    for key in ("finished", "k_steps"):
        told[key] = dict(sum((Counter(part[key]) for part in parts), Counter()))
    used = sum(part["kv_usage"] * part["kv_tokens"] for part in parts)
    told["kv_usage"] = used / told["kv_tokens"] if told["kv_tokens"] else 0.0
    return told | fared(
        told["drafts"], told["accepted_tokens"], told["accepted_at"], told["drafted_at"]
    )


def fared(
    drafts: float, accepted: float, at: Sequence[float], of: Sequence[float]
) -> dict[str, Any]:
    shares = [round(good / tried, 4) if tried else 0.0 for good, tried in zip(at, of, strict=True)]
    return {
        "acceptance_length": round(1 + accepted / drafts, 4) if drafts else 1.0,
        "accepted_per_position": shares,
    }


def from_vllm(page: str) -> dict[str, Any]:
    """Every engine of a vLLM together (data parallel ones have one each); its K does not change."""
    told: dict[str, Any] = dict.fromkeys(FROM_VLLM.values(), 0)
    at: Counter[int] = Counter()
    usage: list[float] = []
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if key := FROM_VLLM.get(sample.name):
                told[key] += int(sample.value)
            elif sample.name == "vllm:spec_decode_num_accepted_tokens_per_pos_total":
                at[int(sample.labels["position"])] += int(sample.value)
            elif sample.name == "vllm:kv_cache_usage_perc":
                usage.append(sample.value)
    accepted_at = [at[i] for i in range(len(at))]
    told |= {"accepted_at": accepted_at, "kv_usage": sum(usage) / len(usage) if usage else 0.0}
    return told | fared(
        told["drafts"], told["accepted_tokens"], accepted_at, [told["drafts"]] * len(accepted_at)
    )
