"""Token usage and speculative-decoding statistics of a response."""

from collections.abc import Sequence
from typing import Any

from peagle.server.openai.choice import Choice


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
    steps = [step for choice in choices for step in choice.steps if step.drafted]
    drafted = sum(step.drafted for step in steps)
    accepted = sum(step.accepted for step in steps)
    histogram = []
    if steps:
        longest = max(step.drafted for step in steps)
        histogram = [sum(step.accepted == count for step in steps) for count in range(longest + 1)]
    return {
        "mean_acceptance_length": round(1 + accepted / len(steps), 4) if steps else 1.0,
        "draft_acceptance_rate": round(accepted / drafted, 4) if drafted else 0.0,
        "acceptance_histogram": histogram,
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
    }
