"""Failures: one failed request does not affect others, and invalid requests are refused."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import chain
from typing import Any

import pytest
import torch

from peagle.core import DRAFTER_METHODS, METHODS, Method
from peagle.engine import Engine, EngineConfig
from peagle.engine.device import DeviceLost, is_device_lost
from peagle.engine.kv.kv_cache import KVCache
from peagle.engine.model import hf_paged
from peagle.engine.model.hf_paged import PagedContext
from peagle.engine.schedule.queue import QueueFull
from peagle.engine.stream import RequestFailed, Stream
from peagle.errors import UserError
from peagle.kernels.attention_params import AttentionParams
from peagle.kernels.triton.attention import paged_attention
from tests.support.engine.decoding import tokens_of
from tests.support.engine.engines import (
    TIGHT,
    engine_of,
    pair_of,
    reference_steps,
    small,
    some_requests,
    steps_of,
)
from tests.support.models.tiny_models import ENGINE_PATHS, make_drafter, make_target

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


def test_invalid_requests_are_refused_without_effect(prompt) -> None:
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
    assert steps_of(first) == reference_steps(small(), "p-eagle", prompt(9), max_tokens=10)


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({"context": 40}, "or raise `context`$"),
        ({"kv_tokens": 40}, "or raise `kv_tokens`$"),
        ({"kv_tokens": 4096}, "context holds 256 .*: shorten it$"),
    ],
)
def test_too_long_prompts_name_the_limiting_option(
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
    engine.step()  # One request is admitted.
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
        ({"max_batch": 0}, "`max_batch` is 0: use a whole number of at least 1$"),
        ({"max_batch": -2}, "`max_batch` is -2"),
        ({"max_batch": 2.5}, "`max_batch` is 2.5"),
        ({"max_queue": 0}, "`max_queue` is 0"),
        ({"page_size": 0}, "`page_size` is 0"),
        ({"tree": -1}, "`tree` is -1: use a whole number of at least 0, or leave it out"),
        ({"context": 1}, "`context` is 1: use a whole number of at least 2, or leave it out"),
        ({"kv_tokens": 0}, "`kv_tokens` is 0"),
        ({"prefill_chunk": -1}, "`prefill_chunk` is -1"),
        ({"drafter_window": -1}, "`drafter_window` is -1"),
        ({"reserved_gib": -0.5}, "`reserved_gib` is -0.5: use 0 or more"),
        ({"reserved_gib": float("nan")}, "`reserved_gib` is nan"),
        ({"max_batch": 10**9, "kv_tokens": 10**14}, "`kv_tokens`, `max_batch` or `context`"),
    ],
)
def test_invalid_engine_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Engine(small(), EngineConfig(**{"method": "p-eagle", "thread": False} | options))


# Logits that are not finite.


class Poisoned:
    """A pair whose target gives NaN for one token, which answers never contain."""

    def __init__(self, name: str) -> None:
        target = make_target(name, tie_word_embeddings=False)
        drafters = {m: make_drafter(target, m, 1, draft_vocab=40) for m in DRAFTER_METHODS}
        self.pair = pair_of(target, drafters)
        self.good = some_requests(5, seed=9, max_tokens=8)
        self.expected = {
            m: [reference_steps(self.pair, m, ids, **options) for ids, options in self.good]
            for m in METHODS
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
        """A prompt with the token that gives NaN; it starts like the longest good one."""
        longest = max((ids for ids, _ in self.good), key=len)
        return [*longest[:30], self.token, 7, 8]


@cache
def poisoned_pair(name: str) -> Poisoned:
    """The pair, built once per process."""
    return Poisoned(name)


@pytest.fixture(params=ENGINE_PATHS)
def poisoned(request: pytest.FixtureRequest) -> Poisoned:
    return poisoned_pair(request.param)


every_method = pytest.mark.parametrize(
    ("poisoned", "method"),
    [  # Every method runs with one code path of the engine, P-EAGLE with all of them.
        pytest.param(
            *(name, method),
            marks=[] if method == "p-eagle" or name == "llama" else pytest.mark.slow,
        )
        for name in ENGINE_PATHS
        for method in METHODS
    ],
    indirect=["poisoned"],
)


@every_method
def test_nan_logits_fail_only_their_request(poisoned: Poisoned, method: Method) -> None:
    engine = engine_of(poisoned.pair, method)
    streams, failed = [], list[Stream]()
    # Each bad request is prefilled with a good one, and later ones reuse its pages.
    for ids, options in poisoned.good:
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


@every_method
def test_pages_of_a_failed_request_are_cleared(poisoned: Poisoned, method: Method) -> None:
    """Good requests can reuse pages that had NaN, also after an abort."""
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


@every_method
def test_nan_logits_during_the_answer(poisoned: Poisoned, method: Method) -> None:
    """The answer generates the token; pieces before it are delivered."""
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


def reset_as_on_a_gpu(self: KVCache, pages: list[int], unverified: list[int]) -> None:
    """Clear only pages that may have NaN, as on a GPU."""
    self.zero_pages(unverified)


def attend_as_on_a_gpu(
    run: Any, module: Any, query: torch.Tensor, paged: PagedContext, kwargs: dict[str, Any]
) -> torch.Tensor:
    """Read keys up to the last row, and mask them by zeros, as the Triton kernel does."""
    keys, values = (
        cache[module.layer_idx] for cache in (paged.kv_cache.keys, paged.kv_cache.values)
    )
    params = AttentionParams(kwargs["scaling"])
    return paged_attention.reference(query[0].transpose(0, 1), keys, values, paged.rows, params)[
        None
    ]


@pytest.mark.parametrize("method", DRAFTER_METHODS)
@pytest.mark.parametrize("abort", [True, False])
def test_pages_of_an_aborted_request_in_flight_are_cleared(
    monkeypatch: pytest.MonkeyPatch, method: Method, abort: bool
) -> None:
    """After an abort before its logits are read, the next owner of its pages reads no NaN.

    Rows of drafts beyond the context are not stored, so old keys of the page are read there.
    """
    monkeypatch.setattr(KVCache, "reset_pages", reset_as_on_a_gpu)
    monkeypatch.setattr(hf_paged, "attend_by_blocks", attend_as_on_a_gpu)
    poisoned = poisoned_pair("llama")
    options = {"page_size": 16, "kv_tokens": 96, "context": 42, "prefill_chunk": 64}
    ids = poisoned.good[0][0]
    expected = tokens_of(
        reference_steps(poisoned.pair, "none", ids, max_tokens=42 - len(ids), ignore_eos=True)
    )
    engine = engine_of(poisoned.pair, method, **options)
    assert isinstance(engine.loop.stepper.verifier, hf_paged.HFPagedTarget)
    engine.loop.lookahead = 1
    broken = [engine.add([poisoned.token] * 16, max_tokens=8) for _ in range(3)]
    engine.step()
    assert engine.loop.in_flight
    for stream in broken:
        if abort:
            stream.abort()
    if not abort:
        engine.drain()
    good = engine.add(ids, max_tokens=42, ignore_eos=True)
    engine.drain()
    engine.check_integrity()
    assert tokens_of(steps_of(good)) == expected


def test_shared_pages_of_failed_choices_are_cleared(poisoned: Poisoned) -> None:
    """They share pages with NaN, which are cleared after the last of them."""
    engine = engine_of(poisoned.pair, "p-eagle", kv_tokens=96)
    (ids, options), steps = poisoned.good[0], poisoned.expected["p-eagle"][0]
    for _ in range(2):
        failed = [engine.add(poisoned.bad(), max_tokens=8) for _ in range(3)]
        engine.step()
        failed.pop().abort()
        good = engine.add(ids, **options)
        engine.drain()
        engine.check_integrity()
        assert steps_of(good) == steps
        for stream in failed:
            with pytest.raises(RequestFailed, match="not finite"):
                list(stream)
    kv_cache = engine.loop.stepper.kv_cache
    engine.add(poisoned.good[1][0], **poisoned.good[1][1])
    engine.drain()
    unverified = engine.loop.scheduler.allocator.unverified
    for page in set(range(kv_cache.num_pages + 1)) - unverified:
        cells = slice(page * kv_cache.page_size, (page + 1) * kv_cache.page_size)
        assert all(cache[cells].isfinite().all() for cache in (*kv_cache.keys, *kv_cache.values))


# Lost devices.

ILLEGAL_ACCESS = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be"


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError(ILLEGAL_ACCESS), True),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), True),
        (torch.AcceleratorError("CUDA error: unspecified launch failure"), True),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), True),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), True),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx"),
            True,
        ),
        (RuntimeError("CUDA error: unknown error"), True),
        (DeviceLost("the device is lost"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), False),
        (torch.AcceleratorError("CUDA error: out of memory"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), False),
        (RuntimeError("CUDA error: operation not permitted when stream is capturing"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError(ILLEGAL_ACCESS), False),
    ],
)
def test_which_errors_mean_a_lost_device(error: Exception, lost: bool) -> None:
    assert is_device_lost(error) is lost
    wrapped = UserError("the KV cache does not fit")
    wrapped.__cause__ = error
    assert is_device_lost(wrapped) is lost


def lose_device(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every call to the device raise, as after a sticky CUDA error."""

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError(ILLEGAL_ACCESS)

    stepper = engine.loop.stepper
    monkeypatch.setattr(stepper, "decode", fail)
    monkeypatch.setattr(stepper.prefill, "run", fail)
    monkeypatch.setattr(stepper.kv_cache, "zero_pages", fail)
    monkeypatch.setattr(stepper.slots, "write_tables", fail)


LOST = "the device is lost, start a new process: CUDA error: an illegal memory access.*encountered$"


def test_a_lost_device_ends_all_streams(monkeypatch: pytest.MonkeyPatch, prompt) -> None:
    engine = Engine(small(), EngineConfig(method="p-eagle", k=3, **TIGHT | {"max_batch": 2}))
    with engine.loop.lock:
        streams = [engine.add(prompt(5 + i), max_tokens=90, ignore_eos=True) for i in range(4)]
        lose_device(engine, monkeypatch)
    with ThreadPoolExecutor() as pool:
        for future in [pool.submit(list, stream) for stream in streams]:
            with pytest.raises(RequestFailed, match=LOST):
                future.result(timeout=60)
    with pytest.raises(UserError, match=LOST):
        engine.add(prompt(5))
    engine.close()
    assert engine._thread is not None and not engine._thread.is_alive()
    engine.check_integrity()


def test_step_raises_if_the_device_is_lost(monkeypatch: pytest.MonkeyPatch, prompt) -> None:
    engine = engine_of(small(), "p-eagle", max_batch=2)
    streams = [engine.add(prompt(5 + i), max_tokens=9) for i in range(4)]
    engine.step()
    lose_device(engine, monkeypatch)
    with pytest.raises(DeviceLost, match=LOST):
        engine.step()
    for stream in streams:
        with pytest.raises(RequestFailed, match=LOST):
            list(stream)
    assert engine.closed and not engine.busy
    engine.close()
    with pytest.raises(UserError, match=LOST):
        engine.step()


def test_every_stream_ends_even_if_the_scheduler_raises(
    monkeypatch: pytest.MonkeyPatch, prompt
) -> None:
    engine = engine_of(small(), "none")
    streams = [engine.add(prompt(5 + i), max_tokens=9) for i in range(3)]
    engine.step()
    monkeypatch.setattr(engine.loop.scheduler, "finish", lambda *_: 1 / 0)
    assert isinstance(engine.fail("it stopped"), ZeroDivisionError)
    for stream in streams:
        with pytest.raises(RequestFailed, match="it stopped"):
            list(stream)


# Errors of the engine loop.


def test_an_error_of_the_loop_ends_all_streams(monkeypatch: pytest.MonkeyPatch, prompt) -> None:
    engine = Engine(small(), EngineConfig(method="p-eagle", k=3, **TIGHT | {"max_batch": 2}))

    all_added = threading.Event()

    def lost(*_: Any) -> None:
        all_added.wait()
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(engine.loop.stepper, "decode", lost)
    with ThreadPoolExecutor() as pool:
        streams = [engine.add(prompt(5 + i), max_tokens=9) for i in range(2)]
        all_added.set()
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


def test_an_error_of_the_loop_ends_waiting_requests(
    monkeypatch: pytest.MonkeyPatch, prompt
) -> None:
    engine = Engine(small(), EngineConfig(method="none", **TIGHT | {"max_batch": 1}))
    with engine.loop.lock:  # All are added before the first step.
        monkeypatch.setattr(engine.loop, "_prefill", lambda *_: 1 / 0)
        streams = [engine.add(prompt(5), max_tokens=9) for _ in range(3)]
    with ThreadPoolExecutor() as pool:
        for future in [pool.submit(list, stream) for stream in streams]:
            with pytest.raises(RequestFailed, match="ZeroDivisionError"):
                future.result(timeout=60)
    engine.check_integrity()


def test_step_raises_the_original_error(monkeypatch: pytest.MonkeyPatch, prompt) -> None:
    engine = engine_of(small(), "none")
    monkeypatch.setattr(engine.loop, "_prefill", lambda *_: 1 / 0)
    engine.add(prompt(5))
    with pytest.raises(ZeroDivisionError):
        engine.step()


@pytest.mark.parametrize("method", METHODS)
def test_pages_for_one_request_only(method: Method) -> None:
    """All other requests are preempted repeatedly, but none fails."""
    requests = some_requests(6, seed=12, max_tokens=12, ignore_eos=True)
    longest = max(len(ids) for ids, _ in requests) + 12
    engine = engine_of(small(), method, kv_tokens=longest, max_batch=6)
    streams = [engine.add(ids, **options) for ids, options in requests]
    while engine.step():
        engine.check_integrity()
    assert [steps_of(stream) for stream in streams] == [
        reference_steps(small(), method, ids, **options) for ids, options in requests
    ]
    assert engine.status()["finished"] == {"length": 6}


@pytest.mark.parametrize("abort", [False, True])
def test_pages_of_a_failed_prefill_are_not_shared(abort: bool) -> None:
    """Pages are shareable when their chunk is planned, but not after a failed pass."""
    [(ids, _)] = some_requests(1, seed=5)
    ids = ids * 3  # Several full pages.
    options = {"page_size": 8, "prefill_chunk": 64, "kv_tokens": 400}
    engine = engine_of(small(), "p-eagle", **options)
    first = engine.add(ids, max_tokens=12, ignore_eos=True)
    engine.drain()
    expected = tokens_of(steps_of(first))
    engine = engine_of(small(), "p-eagle", **options)
    run = engine.loop.stepper.prefill.run

    def broken(*_: Any) -> None:
        raise RuntimeError("out of memory")

    engine.loop.stepper.prefill.run = broken  # type: ignore[method-assign]
    streams = [engine.add(ids, max_tokens=12, ignore_eos=True) for _ in range(3)]
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()
    engine.check_integrity()
    engine.loop.stepper.prefill.run = run  # type: ignore[method-assign]
    if abort:
        streams[0].abort()
        streams = [*streams[1:], engine.add(ids, max_tokens=12, ignore_eos=True)]
    engine.drain()
    engine.check_integrity()
    for stream in streams:
        assert tokens_of(steps_of(stream)) == expected
