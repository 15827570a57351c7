"""Memory: closed engines are freed, packed weights are shared, and pairs keep few engines."""

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch

from peagle import loaded
from peagle.engine import Engine, EngineConfig, sizing
from peagle.engine.model import weight
from peagle.engine.model.fused_llama import FusedLlamaTarget
from peagle.engine.model.weight import Weight
from peagle.engine.stream import RequestFailed
from peagle.errors import UserError
from peagle.kernels.cpu.matrix import can_pack
from peagle.kernels.cpu.reordered import can_reorder
from peagle.loaded import MAX_ENGINES, EngineKey, LoadedPair
from peagle.target import Target
from tests.support.engine.engines import TIGHT, engine_of, pair_of, small, small_with_words
from tests.support.kernels.cpu_features import needs_c
from tests.support.models.tiny_models import make_drafter, make_target

SHAPES: list[dict[str, Any]] = [
    {"method": "none"},
    {"method": "eagle3", "k": 3},
    {"method": "p-eagle", "k": 3},
    {"method": "p-eagle", "k": "auto"},
    {"method": "p-eagle", "k": 3, "tree": 8},
]


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def bf16_pair() -> LoadedPair:
    target = make_target()
    target.model.to(torch.bfloat16)
    return pair_of(target, {"p-eagle": make_drafter(target, "p-eagle", 2)})


@pytest.mark.parametrize("thread", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_closed_engine_is_freed_without_the_collector(
    shape: dict[str, Any], thread: bool, no_collector: None
) -> None:
    engine = Engine(small(), EngineConfig(thread=thread, **TIGHT, **shape))
    stream = engine.add([5, 6, 7], max_tokens=4, temperature=1.0)
    if not thread:
        engine.drain()
    assert list(stream)
    parts = [engine, engine.loop, engine.loop.stepper, engine.loop.stepper.kv_cache]
    parts.append(engine.loop.stepper.verifier)
    references = [ref(part) for part in parts]
    engine.close()
    del engine, stream, parts
    assert [reference() for reference in references] == [None] * len(references)


@pytest.mark.parametrize("name", ["gpt-oss", "gemma2"])  # with and without fused layers
def test_engine_of_another_target_is_freed_too(name: str, no_collector: None) -> None:
    target = make_target(name)
    engine = engine_of(pair_of(target, {"p-eagle": make_drafter(target, "p-eagle", 2)}), "p-eagle")
    engine.add([5, 6, 7], max_tokens=4)
    engine.drain()
    references = [ref(engine), ref(engine.loop.stepper.kv_cache), ref(engine.loop.stepper.verifier)]
    engine.close()
    del engine
    assert [reference() for reference in references] == [None] * 3


def test_a_program_ends_while_its_engine_runs() -> None:
    """A thread inside a kernel would abort the process at exit."""
    program = """
from tests.support.engine.engines import small
from peagle.engine import Engine, EngineConfig
engine = Engine(small(), EngineConfig(method="none"))
next(iter(engine.add([5, 6, 7], max_tokens=200, ignore_eos=True)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_stream_of_a_closed_engine_keeps_no_kv_cache(no_collector: None) -> None:
    """A slow client keeps its stream and therefore the engine object, but not the KV cache."""
    engine = engine_of(small(), "p-eagle")
    stream = engine.add([5, 6, 7], max_tokens=40)
    engine.step()
    stepper = engine.loop.stepper
    parts = (stepper.kv_cache, stepper.verifier, stepper.prefill, stepper.deferred_rows)
    references = [ref(part) for part in parts]
    del parts
    engine.close()
    assert [reference() for reference in references] == [None] * 4
    assert engine.status()["finished"] == {"error": 1} and not engine.busy
    engine.check_integrity()
    stream.abort()
    engine.close()  # Closing twice is allowed.
    with pytest.raises(RequestFailed, match="the engine was closed"):
        list(stream)
    with pytest.raises(UserError, match="closed"):
        engine.step()


@needs_c
def test_engines_of_a_pair_share_packed_weights() -> None:
    pair = bf16_pair()
    before = len(weight._copies)
    engines = [engine_of(pair, "p-eagle", k=k) for k in (1, 2, 3)]
    packed = len(weight._copies) - before
    first, *others = [packed_matrices(engine) for engine in engines]
    assert first and all(other == first for other in others)
    engines.append(engine_of(pair, "p-eagle", k=4))
    assert len(weight._copies) - before == packed
    engines.append(engine_of(pair, "p-eagle", k=1, int8=True))
    assert not set(packed_matrices(engines[-1])) & set(first)
    for engine in engines:
        engine.close()
    assert len(weight._copies) == before


def packed_matrices(engine: Engine) -> list[int]:
    """The identities of the target's packed matrices."""
    verifier = engine.loop.stepper.verifier
    assert isinstance(verifier, FusedLlamaTarget)
    weights = [*(weight for layer in verifier.layers for weight in layer.weights), verifier.lm_head]
    assert all(weight.matrix is not None for weight in weights)
    return [id(weight.matrix) for weight in weights]


def test_packed_copy_belongs_to_its_weight() -> None:
    """A weight at the address of a freed one must not get the packed copy of that one."""
    if not can_pack(one := torch.ones(64, 64, dtype=torch.bfloat16)) and not can_reorder(one):
        pytest.skip("nothing is packed on this CPU")
    x = torch.ones(3, 64, dtype=torch.bfloat16)
    for value in range(1, 6):
        plain = torch.full((64, 64), float(value), dtype=torch.bfloat16)
        first, second = Weight(plain), Weight(plain)
        assert first._copy is second._copy
        assert (first(x) == 64 * value).all()
        bias = torch.ones(64, dtype=torch.bfloat16)
        assert (Weight(plain, bias)(x) == 64 * value + 1).all()
        del plain, first, second


@pytest.mark.parametrize("lookahead", [0, 1])
def test_pair_keeps_few_engines(lookahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a lookahead, as on a GPU, a pass is in flight when an answer has ended."""

    def build(*args: Any) -> Engine:
        engine = Engine(*args)
        engine.loop.lookahead = lookahead
        return engine

    monkeypatch.setattr(loaded, "Engine", build)
    pair = pair_of(small().target, small().loaded_drafters)
    kept: list[ref[Engine]] = []
    answers = []
    for k in (*range(1, MAX_ENGINES + 4), 1):
        answers.append(pair.generate([5, 6, 7], k=k, method="p-eagle", max_tokens=6).token_ids)
        kept += [ref(engine) for engine in pair._engines.values()]
        assert len(pair._engines) <= MAX_ENGINES
    assert [key.k for key in pair._engines] == [5, 6, 7, 1]
    assert all(answer == answers[0] for answer in answers)
    alive = {id(engine) for reference in kept if (engine := reference()) is not None}
    assert alive == {id(engine) for engine in pair._engines.values()}


def test_pair_closes_no_engine_that_is_answering() -> None:
    """A listener may use the same pair for other answers during a step."""
    pair = small_with_words()
    nested = []

    def listen(_: str) -> None:
        for k in range(2, MAX_ENGINES + 4):
            nested.append(pair.generate([8, 9], k=k, method="p-eagle", max_tokens=2).token_ids)

    expected = pair.generate([5, 6, 7], k=1, method="p-eagle", max_tokens=8)
    answer = pair.generate([5, 6, 7], k=1, method="p-eagle", max_tokens=8, on_text=listen)
    assert nested and answer.token_ids == expected.token_ids


def test_pair_closes_no_engine_whose_answer_is_not_read() -> None:
    """A step in another thread may complete an answer before its own thread reads it."""
    pair = pair_of(small().target, small().loaded_drafters)
    with pair._engine(EngineKey("p-eagle", 2, 0, None, False, 256)) as engine:
        stream = engine.add([5, 6, 7], max_tokens=6)
        engine.drain()
        for k in range(3, MAX_ENGINES + 5):
            pair.generate([5, 6, 7], k=k, method="p-eagle", max_tokens=3)
        assert not engine.closed and list(stream)


@pytest.mark.parametrize("thread", [False, True])
def test_engine_closed_by_a_listener_is_freed_after_its_step(thread: bool) -> None:
    engine = Engine(small(), EngineConfig(method="p-eagle", k=3, thread=thread, **TIGHT))
    reference = ref(engine.loop.stepper.kv_cache)
    with engine.loop.lock:
        stream = engine.add([5, 6, 7], max_tokens=40, ignore_eos=True)
        stream.on_piece(engine.close)
    if not thread:
        engine.step()
    with pytest.raises(RequestFailed, match="closed"):
        list(stream)
    engine.close()
    assert reference() is None


def test_close_waits_for_the_step_of_another_thread() -> None:
    engine = engine_of(small(), "p-eagle")
    engine.add([5, 6, 7], max_tokens=40, ignore_eos=True)
    in_step = threading.Event()
    closing = threading.Event()
    errors: list[Exception] = []
    decode = engine.loop.stepper.prefill.run

    def slow(*args: Any) -> Any:
        in_step.set()
        closing.wait(60)
        time.sleep(0.1)  # So that `close` would release the KV cache before this pass.
        return decode(*args)

    engine.loop.stepper.prefill.run = slow  # type: ignore[method-assign]

    def run() -> None:
        try:
            engine.step()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    in_step.wait(60)
    closing.set()
    engine.close()
    thread.join(60)
    assert not errors and not engine.loop.run()  # A step after the release does nothing.


def test_memory_reserved_for_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for the trainer of `peagle serve --learn` on the same GPU."""
    pair = pair_of(make_target())
    page_bytes = 1 << 20
    shapes = [SimpleNamespace(bytes=page_bytes // EngineConfig().page_size)]
    monkeypatch.setattr(sizing, "kv_shapes", lambda target, drafter: shapes)
    monkeypatch.setattr(Target, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4 << 30, 0))

    def pages(reserved_gib: float) -> int:
        config = EngineConfig(max_batch=1 << 20, reserved_gib=reserved_gib)
        return sizing.kv_page_count(config, pair, None, 2048, 8)

    assert pages(0) == int(0.85 * 4096)
    assert pages(1.5) == int(0.85 * 2560)
    assert pages(9) == 1
