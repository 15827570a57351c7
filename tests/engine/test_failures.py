"""Failures: a request fails alone, with a reason; what can never run is refused at once."""

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import pytest
import torch

from peagle.core import METHODS, Method
from peagle.engine import Engine, EngineConfig
from peagle.engine.schedule.queue import QueueFull
from peagle.engine.stream import RequestFailed, Stream
from peagle.errors import UserError
from tests.support.decoding import tokens_of
from tests.support.engines import TIGHT, alone, engine_of, pair_of, small, some_requests, steps_of
from tests.support.tiny_models import make_drafter, make_target

REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    ([], {}, "at least one"),
    ([96], {}, r"token ids \[96\] are outside the target's vocabulary of 96"),
    ([5, -1], {}, r"token ids \[-1\]"),
    ([5] * 64, {}, "64 tokens.*context holds 64.*shorten it, or raise `context`"),
    ([5], {"logit_bias": {96: 1.0}}, r"logit_bias names token ids \[96\].*ends at 95"),
    ([5], {"logit_bias": {4: 200.0}}, r"logit_bias must be in \[-100, 100\]"),
    ([5], {"temperature": -1}, "temperature"),
    ([5], {"max_tokens": 0}, "`max_tokens` must be 1 or more"),
    ([5], {"max_tokens": 4, "min_tokens": 5}, r"`min_tokens` must be in 0..max_tokens \(4\)"),
    ([5], {"logprobs": 21}, "logprobs"),
    ([5], {"stop": ("x",)}, "`stop` needs a tokenizer"),
    ("words", {}, "no tokenizer"),
    ([5], {"id": "first"}, "'first' is not finished yet"),
]


def test_what_can_never_run_is_refused_and_leaves_nothing(prompt) -> None:
    engine = engine_of(small(), "p-eagle", context=64)
    first = engine.add(prompt(9), id="first", max_tokens=10)
    engine.step()
    before = engine.status(), engine.loop.scheduler.allocator.num_free
    for ids, options, words in REFUSED:
        with pytest.raises(UserError, match=words):
            engine.add(ids, **options)
        engine.check_integrity()
    assert (engine.status(), engine.loop.scheduler.allocator.num_free) == before
    engine.drain()
    assert steps_of(first) == alone(small(), "p-eagle", prompt(9), max_tokens=10)


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({"context": 40}, "or raise `context`$"),
        ({"kv_tokens": 40}, "or raise `kv_tokens`$"),
        ({"kv_tokens": 4096}, "context holds 256 .*: shorten it$"),
    ],
)
def test_a_prompt_that_is_too_long_names_what_limits_it(
    options: dict[str, Any], fix: str, prompt
) -> None:
    engine = engine_of(small(), "none", **options)
    with pytest.raises(UserError, match=fix):
        engine.add(prompt(300))


def test_a_full_queue(prompt) -> None:
    engine = engine_of(small(), "none", max_queue=2, max_batch=1)
    streams = [engine.add(prompt(5), max_tokens=4) for _ in range(2)]
    with pytest.raises(QueueFull, match="try again later"):
        engine.add(prompt(5))
    engine.step()  # one is admitted
    streams.append(engine.add(prompt(5), max_tokens=4))
    engine.check_integrity()
    engine.drain()
    assert {len(tokens_of(steps_of(stream))) for stream in streams} == {4}
    assert engine.status()["finished"] == {"length": 3}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"k": 0}, "K is 0"),
        ({"k": "many"}, "or to auto"),
        ({"method": "medusa"}, "unknown method"),
        ({"max_batch": 10**9, "kv_tokens": 10**14}, "`kv_tokens`, `max_batch` or `context`"),
    ],
)
def test_an_engine_that_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Engine(small(), EngineConfig(**{"method": "p-eagle", "thread": False} | options))


# Logits that are not numbers.


class Poisoned:
    """A pair whose target gives NaN for one token, which is in one prompt and never generated."""

    def __init__(self, name: str = "llama") -> None:
        target = make_target(name)
        drafters = {m: make_drafter(target, m, 1, draft_vocab=40) for m in METHODS[1:]}
        self.pair = pair_of(target, drafters)
        self.good = some_requests(8, seed=9, max_tokens=8)
        self.expected = {
            m: [alone(self.pair, m, ids, **options) for ids, options in self.good] for m in METHODS
        }
        drafted = chain(
            *(
                target_ids.tolist()
                for d in drafters.values()
                if (target_ids := d.target_ids) is not None
            )
        )
        used = {
            *drafted,
            *chain(*(ids for ids, _ in self.good)),
            *chain(*map(tokens_of, self.expected["none"])),
        }
        self.token = next(token for token in range(6, 96) if token not in used)
        target.embedding.data[self.token] = torch.nan

    def bad(self) -> list[int]:
        """Begins like the good ones."""
        longest = max((ids for ids, _ in self.good), key=len)
        return [*longest[:30], self.token, 7, 8]


@pytest.fixture(scope="module", params=["llama", "qwen3-moe"])
def poisoned(request: pytest.FixtureRequest) -> Poisoned:
    return Poisoned(request.param)


@pytest.mark.parametrize("method", METHODS)
def test_a_request_whose_logits_are_not_numbers_fails_alone(
    poisoned: Poisoned, method: Method
) -> None:
    engine = engine_of(poisoned.pair, method)
    streams, failed = [], list[Stream]()
    for (
        ids,
        options,
    ) in (
        poisoned.good
    ):  # after every good one a bad one: it is prefilled with some, and others follow in its pages
        streams.append(engine.add(ids, **options))
        failed.append(engine.add(poisoned.bad(), max_tokens=8))
        engine.step()
        engine.check_integrity()
    engine.drain()
    engine.check_integrity()
    for stream in failed:
        with pytest.raises(RequestFailed, match=r"not finite.*`dtype` to float32"):
            list(stream)
    assert [steps_of(stream) for stream in streams] == poisoned.expected[method]
    assert (
        engine.status()["finished"]["error"] == len(failed)
        and engine.loop.scheduler.allocator.num_free == engine.loop.scheduler.allocator.num_pages
    )


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_left_in_its_pages(poisoned: Poisoned, method: Method) -> None:
    """Good requests get the pages that held NaN, also after an abort."""
    for end in (lambda engine, stream: engine.drain(), lambda engine, stream: stream.abort()):
        engine = engine_of(poisoned.pair, method, kv_tokens=52)
        for (ids, options), steps in zip(
            poisoned.good[:3], poisoned.expected[method], strict=False
        ):
            bad = engine.add([poisoned.token, *poisoned.bad()], max_tokens=8)
            for _ in range(2):
                engine.step()
            end(engine, bad)
            stream = engine.add(ids, **options)
            engine.drain()
            assert steps_of(stream) == steps


@pytest.mark.parametrize("method", METHODS)
def test_it_may_happen_late(poisoned: Poisoned, method: Method) -> None:
    """The answer itself comes to the token: what was said before has been told."""
    engine, (ids, options) = engine_of(poisoned.pair, method), poisoned.good[0]
    stream = engine.add(ids, logit_bias={poisoned.token: 100.0}, **options)
    good = engine.add(ids, **options)
    engine.drain()
    assert steps_of(good) == poisoned.expected[method][0]
    pieces = iter(stream)
    assert next(pieces).step.tokens == (poisoned.token,)  # type: ignore[union-attr]
    with pytest.raises(RequestFailed, match="not finite"):
        next(pieces)
    assert stream.ended


# The loop.


def test_the_loop_dies_and_everybody_is_told(monkeypatch: pytest.MonkeyPatch, prompt) -> None:
    engine = Engine(small(), EngineConfig(method="p-eagle", k=3, **TIGHT | {"max_batch": 2}))

    everybody = threading.Event()

    def lost(*_: Any) -> None:
        everybody.wait()
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(engine.loop.stepper, "decode", lost)
    with ThreadPoolExecutor() as pool:
        streams = [engine.add(prompt(5 + i), max_tokens=9) for i in range(2)]
        everybody.set()
        for future in [pool.submit(list, stream) for stream in streams]:
            with pytest.raises(
                RequestFailed, match="the engine stopped: RuntimeError: the device is lost"
            ):
                future.result(timeout=60)
    with pytest.raises(UserError, match="the device is lost"):
        engine.add(prompt(5))
    engine.check_integrity()
    engine.close()
    with pytest.raises(UserError, match="the device is lost"):
        engine.step()


def test_waiting_requests_are_told_too(monkeypatch: pytest.MonkeyPatch, prompt) -> None:
    engine = Engine(small(), EngineConfig(method="none", **TIGHT | {"max_batch": 1}))
    with engine.loop.lock:  # all are there before the first step
        monkeypatch.setattr(engine.loop, "_prefill", lambda *_: 1 / 0)
        streams = [engine.add(prompt(5), max_tokens=9) for _ in range(3)]
    with ThreadPoolExecutor() as pool:
        for future in [pool.submit(list, stream) for stream in streams]:
            with pytest.raises(RequestFailed, match="ZeroDivisionError"):
                future.result(timeout=60)
    engine.check_integrity()


def test_a_caller_of_step_sees_the_error_itself(monkeypatch: pytest.MonkeyPatch, prompt) -> None:
    engine = engine_of(small(), "none")
    monkeypatch.setattr(engine.loop, "_prefill", lambda *_: 1 / 0)
    engine.add(prompt(5))
    with pytest.raises(ZeroDivisionError):
        engine.step()


@pytest.mark.parametrize("method", METHODS)
def test_pages_for_one_request_only(method: Method) -> None:
    """Everybody else is preempted, again and again; nobody fails."""
    asked = some_requests(6, seed=12, max_tokens=12, ignore_eos=True)
    longest = max(len(ids) for ids, _ in asked) + 12
    engine = engine_of(small(), method, kv_tokens=longest, max_batch=6)
    streams = [engine.add(ids, **options) for ids, options in asked]
    while engine.step():
        engine.check_integrity()
    assert [steps_of(stream) for stream in streams] == [
        alone(small(), method, ids, **options) for ids, options in asked
    ]
    assert engine.status()["finished"] == {"length": 6}
