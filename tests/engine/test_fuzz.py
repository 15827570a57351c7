"""A short fuzz run, and tests of the fuzzer: it detects a planted error and shrinks cases."""

from dataclasses import replace
from typing import Any

import pytest

from peagle.engine.output_processor import OutputProcessor
from peagle.engine.stream import TokenLogprob
from peagle.grammar import Grammar
from tests.support.fuzzing.case import FuzzCase, FuzzRequest, as_test
from tests.support.fuzzing.draw import TARGETS, draw_case
from tests.support.fuzzing.outcome import Outcome, difference
from tests.support.fuzzing.run import FuzzCounts, run_case
from tests.support.fuzzing.shrink import shrink

SEED = 16
CASES = ("llama", "llama words", "qwen3-moe", "gpt2", "exact", "llama", "gpt-oss")


def test_answers_equal_plain_decoding() -> None:
    counts = FuzzCounts()
    for number, target in enumerate(CASES):
        counts += run_case(draw_case(SEED, number, [target]))
    assert counts.near_ties == 0
    assert min(counts.accepted, counts.preemptions, counts.prefix_hits) > 0, counts
    assert min(counts.aborted, counts.grammars) > 0, counts


def test_cases_are_reproducible_with_a_seed() -> None:
    assert draw_case(3, 4) == draw_case(3, 4) != draw_case(3, 5)
    assert set(CASES) == set(TARGETS)
    drawn = [draw_case(SEED, number) for number in range(200)]
    engines = [case.engine for case in drawn]
    assert {engine["page_size"] for engine in engines} == {*range(2, 10), 16}
    assert {case.lookahead for case in drawn} == {0, 1}
    assert {engine.get("tree", 0) for engine in engines} == {0, 6, 9, 15, 31}


@pytest.mark.slow
def test_an_error_is_detected_and_the_case_shrinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted error loses the last token of steps with accepted drafts."""
    deliver = OutputProcessor._deliver_tokens

    def lose_a_token(self, request, launched, batch, index) -> None:  # type: ignore[no-untyped-def]
        if batch.accepted[index] >= 2:
            batch.tokens[index] = batch.tokens[index][:-1]
        deliver(self, request, launched, batch, index)

    monkeypatch.setattr(OutputProcessor, "_deliver_tokens", lose_a_token)

    def fails(case: FuzzCase) -> bool:
        try:
            run_case(case)
        except AssertionError:
            return True
        return False

    drawn = (draw_case(SEED, number, ["llama words"], requests=6) for number in range(9))
    case = next(case for case in drawn if fails(case))
    smaller: list[FuzzCase] = []

    def fails_first(candidate: FuzzCase) -> bool:
        """Accept only the first smaller case that fails, which is enough for this test."""
        if smaller or not fails(candidate):
            return False
        smaller.append(candidate)
        return True

    small = shrink(case, fails_first)
    assert len(small.requests) < len(case.requests) and fails(small)
    monkeypatch.undo()
    assert not fails(small)


def test_a_case_can_be_written_as_a_test() -> None:
    options = {"max_tokens": 4, "stop_ids": frozenset({7}), "grammar": Grammar.regex("[ab]{2,9}")}
    request = FuzzRequest((10, 20), options, arrival=2)
    case = FuzzCase("llama", {"method": "none", "k": 1}, (request,), lookahead=1)
    text = as_test(case, "found")
    assert "arrival=2" in text and "abort_after" not in text
    names: dict[str, Any] = {}
    exec(text, names)
    cases: list[FuzzCase] = []
    names["run_case"] = cases.append
    names["test_found"]()
    assert cases == [case]


def test_differences_between_outcomes() -> None:
    logprob = TokenLogprob(7, -1.0, 2, {8: -0.5})
    expected = Outcome((7, 8), "ab", "stop", (logprob, logprob), accepted=1)
    assert difference(expected, expected) is None
    aborted = replace(expected, tokens=(7,), text="a", reason="abort", logprobs=(logprob,))
    assert difference(aborted, expected) is None
    close = replace(expected, logprobs=(logprob, replace(logprob, logprob=-1.0001)))
    assert difference(close, expected) is None and difference(close, expected, exact=True)
    for other in (
        replace(expected, tokens=(7, 9)),
        replace(expected, text="a"),
        replace(expected, reason="length"),
        replace(expected, logprobs=(logprob,)),
        replace(expected, logprobs=(logprob, replace(logprob, logprob=-1.1))),
        replace(expected, logprobs=(logprob, replace(logprob, rank=4))),
        replace(aborted, tokens=(8,)),
        replace(aborted, text="b"),
    ):
        assert difference(other, expected)
