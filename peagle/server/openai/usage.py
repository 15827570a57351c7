"""Token usage and speculative-decoding statistics of a response."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from peagle.server.openai.choice import Choice, DraftCounts


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """The tokens of a response. A prompt counts once, however many choices it has.

    The choices of a prompt share its pages, so all but the first find it in the prefix cache. Its
    cached tokens are the fewest that one of its choices has found: those known before the request.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # Prompt tokens that were not computed, but found in the prefix cache.

    @staticmethod
    def of(choices: Sequence[Choice]) -> "TokenUsage":
        prompts = {id(choice.prompt): choice.prompt_tokens for choice in choices}
        cached: dict[int, int] = {}
        for choice in choices:
            if choice.tokens:  # Before its first token, it is not known what a choice has found.
                prompt = id(choice.prompt)
                cached[prompt] = min(cached.get(prompt, choice.cached_tokens), choice.cached_tokens)
        return TokenUsage(
            prompt_tokens=sum(prompts.values()),
            completion_tokens=sum(choice.tokens for choice in choices),
            cached_tokens=sum(cached.values()),
        )


def token_usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """The field `usage`, under OpenAI's names."""
    usage = TokenUsage.of(choices)
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
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
