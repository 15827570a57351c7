"""Token usage and speculative-decoding statistics of a response."""

from collections.abc import Sequence
from typing import Any

from peagle.server.openai.choice import Choice, DraftCounts


def token_usage(choices: Sequence[Choice]) -> dict[str, int]:
    """The field `usage`. A prompt counts once, however many choices it has."""
    prompts = {id(choice.prompt): choice.prompt_tokens for choice in choices}
    prompt_tokens = sum(prompts.values())
    completion_tokens = sum(choice.tokens for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def speculative_metrics(choices: Sequence[Choice]) -> dict[str, Any]:
    """The field `metrics.speculative_decoding`, under vLLM's names, for all choices together."""
    counts = DraftCounts()
    for choice in choices:
        counts.merge(choice.draft_counts)
    steps = sum(counts.histogram)
    return {
        "mean_acceptance_length": round(1 + counts.accepted / steps, 4) if steps else 1.0,
        "draft_acceptance_rate": round(counts.accepted / counts.drafted, 4) if steps else 0.0,
        "acceptance_histogram": counts.histogram,
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": counts.accepted,
        "num_draft_tokens": counts.drafted,
    }
