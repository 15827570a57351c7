"""Outcome: the result of a request as its caller sees it, and the comparison of two outcomes."""

from collections.abc import Sequence
from dataclasses import dataclass

from peagle.core import Step
from peagle.engine import Engine
from peagle.engine.stream import RequestFailed, RequestRefused, Stream, TokenLogprob
from tests.support.fuzzing.case import FuzzRequest

LOGPROB_ERROR = 2e-3  # for float32 sums in another order


@dataclass(frozen=True)
class Outcome:
    tokens: tuple[int, ...]
    text: str
    reason: str
    logprobs: tuple[TokenLogprob, ...]
    accepted: int  # drafts


def read_outcome(stream: Stream) -> Outcome:
    """Read the stream of a request that has ended, without waiting."""
    steps: list[Step] = []
    text = ""
    logprobs: list[TokenLogprob] = []
    reason = ""
    try:
        for piece in stream.poll():
            assert not reason, "a piece came after the last one"
            if piece.step is not None:
                steps.append(piece.step)
            text += piece.text
            logprobs += piece.logprobs
            reason = piece.reason or ""
    except RequestRefused as error:
        reason = f"refused: {error}"
    except RequestFailed as error:
        reason = f"error: {error}"
    assert reason, "the request has not ended"
    for step in steps:
        assert len(step.tokens) <= step.accepted + 1 <= step.drafted + 1, step
    tokens = tuple(token for step in steps for token in step.tokens)
    accepted = sum(step.accepted for step in steps)
    return Outcome(tokens, text, reason, tuple(logprobs), accepted)


def check_limits(request: FuzzRequest, outcome: Outcome, engine: Engine) -> None:
    """Check the length, end and text of an answer, which plain decoding could get wrong, too."""
    options = request.options
    longest = min(options["max_tokens"], engine.loop.scheduler.context - len(request.prompt))
    stops = set(options.get("stop_ids", ()))
    stops |= set() if options.get("ignore_eos") else set(engine.target.stop_ids)
    length = len(outcome.tokens)
    assert length <= longest and (outcome.reason != "length" or length == longest)
    if outcome.reason == "length":
        assert outcome.text == engine.pair.decode(list(outcome.tokens)), "text is missing"
    assert stops.isdisjoint(outcome.tokens[:-1]), "the answer continues after a stop token"
    if "grammar" in options:
        return  # It may end an answer before `min_tokens`.
    early = length <= min(options.get("min_tokens", 0), longest)
    assert not early or stops.isdisjoint(outcome.tokens[-1:]), "a stop token before `min_tokens`"
    if outcome.reason == "stop" and stops.isdisjoint(outcome.tokens[-1:]):
        assert options.get("stop"), "the answer ends without a reason"


def difference(found: Outcome, expected: Outcome, exact: bool = False) -> str | None:
    """A readable difference, or None. An aborted answer must be a prefix of the other one."""
    aborted = found.reason == "abort"
    count = len(found.tokens) if aborted else len(expected.tokens)
    characters = len(found.text) if aborted else len(expected.text)
    if found.tokens != expected.tokens[:count]:
        return f"tokens {found.tokens}, expected {expected.tokens}"
    if found.text != expected.text[:characters]:
        return f"text {found.text!r}, expected {expected.text!r}"
    if not aborted and found.reason != expected.reason:
        return f"finish reason {found.reason!r}, expected {expected.reason!r}"
    logprobs = expected.logprobs[: len(found.tokens)]
    if len(found.logprobs) != len(logprobs):
        return f"{len(found.logprobs)} log-probabilities, expected {len(logprobs)}"
    for position, pair in enumerate(zip(found.logprobs, logprobs, strict=True)):
        if not logprobs_agree(*pair, error=0.0 if exact else LOGPROB_ERROR):
            return f"log-probabilities at token {position}: {pair[0]}, expected {pair[1]}"
    return None


def logprobs_agree(found: TokenLogprob, expected: TokenLogprob, error: float) -> bool:
    """Whether log-probabilities agree; tokens with nearly equal ones may be swapped."""
    slack = 1 if error else 0
    return (
        found.token == expected.token
        and abs(found.rank - expected.rank) <= slack
        and values_agree([found.logprob], [expected.logprob], error)
        and values_agree(list(found.top.values()), list(expected.top.values()), error)
        and len(found.top.keys() ^ expected.top.keys()) <= 2 * slack
    )


def values_agree(found: Sequence[float], expected: Sequence[float], error: float) -> bool:
    return len(found) == len(expected) and all(
        abs(a - b) <= error for a, b in zip(found, expected, strict=True)
    )
