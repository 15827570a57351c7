"""Answer: the text of an answer, and what it reveals about speculation."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from peagle.errors import UserError
from peagle.results.spec_counters import SpecCounters

MAX_QUOTED = 100  # characters of a malformed answer, in the error message


def chat_request(prompt: str, max_tokens: int) -> dict[str, Any]:
    """A greedy, streamed chat completion."""
    return {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@dataclass(slots=True)
class Answer:
    text: str = ""
    tokens: int = 0
    chunks: int = 0  # that carry text
    seconds: float = 0.0
    spec: SpecCounters | None = None  # from `metrics.speculative_decoding`

    def add(self, event: dict[str, Any]) -> None:
        for choice in event.get("choices") or []:
            delta = choice.get("delta") or {}
            reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
            text = reasoning + (delta.get("content") or "")
            self.text += text
            self.chunks += bool(text)
        usage = event.get("usage") or {}
        self.tokens = max(self.tokens, int(usage.get("completion_tokens") or 0))
        metrics = event.get("metrics") or {}
        spec = read_spec(metrics.get("speculative_decoding"))
        self.spec = spec if spec is not None else self.spec


def read_answer(events: Iterable[dict[str, Any]]) -> Answer:
    answer = Answer()
    start = time.perf_counter()
    for event in events:
        try:
            answer.add(event)
        except (AttributeError, TypeError, ValueError) as error:
            raise UserError(f"the answer is malformed: {str(event)[:MAX_QUOTED]}") from error
    answer.seconds = time.perf_counter() - start
    return answer


def read_spec(fields: Any) -> SpecCounters | None:
    if not isinstance(fields, dict) or "num_spec_steps" not in fields:
        return None
    return SpecCounters(
        drafts=int(fields["num_spec_steps"]),
        draft_tokens=int(fields.get("num_draft_tokens") or 0),
        accepted=int(fields.get("num_accepted_draft_tokens") or 0),
    )


def sum_spec(answers: Iterable[Answer]) -> SpecCounters | None:
    """The counts of all answers; None if an answer has none."""
    total = SpecCounters()
    for answer in answers:
        if answer.spec is None:
            return None
        total.drafts += answer.spec.drafts
        total.draft_tokens += answer.spec.draft_tokens
        total.accepted += answer.spec.accepted
    return total


def tokens_per_chunk(answers: Iterable[Answer]) -> float | None:
    """Servers stream the tokens of a step as one chunk, but may also join chunks."""
    streamed = [answer for answer in answers if answer.chunks and answer.tokens]
    if not streamed:
        return None
    return sum(a.tokens for a in streamed) / sum(a.chunks for a in streamed)
