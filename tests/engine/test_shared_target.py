"""Engines that share a target do not affect each other, even during a pass."""

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from peagle.core import Method
from peagle.engine import Engine, EngineConfig
from peagle.engine.model import hf_paged
from peagle.engine.model.hf_paged import HFPagedTarget
from peagle.engine.model.verifier import build_verifier
from peagle.loaded import LoadedPair
from peagle.target import Target
from tests.support.engine.decoding import tokens_of
from tests.support.engine.engines import engine_of, pair_of, reference_steps, serve
from tests.support.models.tiny_models import AUX, make_drafter, make_target

COUNT = 12  # tokens of an answer
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 3}  # Sampling gives varied tokens.
SETTINGS: dict[str, Any] = {"max_tokens": COUNT, "ignore_eos": True, **SAMPLED}
PROMPTS = [[5 + i, 6, 7, 8, 9 + i] for i in range(3)]


def drafting_pair(name: str) -> LoadedPair:
    target = make_target(name)
    return pair_of(target, {"p-eagle": make_drafter(target, "p-eagle", 1)})


def answers(pair: LoadedPair, method: Method) -> list[list[int]]:
    engine = engine_of(pair, method, kv_tokens=400)
    return [tokens_of(steps) for steps in serve(engine, [(ids, SETTINGS) for ids in PROMPTS])]


def expected(pair: LoadedPair) -> list[list[int]]:
    steps = [reference_steps(pair, "none", ids, **SETTINGS) for ids in PROMPTS]
    pair.target.tap(())
    return [tokens_of(answer) for answer in steps]


def run_inside_passes(monkeypatch: pytest.MonkeyPatch, work: Callable[[], None]) -> None:
    """Run `work` once in another thread, while a pass is between two layers."""
    own = hf_paged.attend_by_blocks
    calls = iter(range(1 << 20))

    def attend(*args: Any) -> torch.Tensor:
        if next(calls) == 100:  # in a decode step
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        return own(*args)

    monkeypatch.setattr(hf_paged, "attend_by_blocks", attend)


@pytest.mark.parametrize(  # targets that run through transformers
    ("name", "method"),
    [("gemma2", "none"), ("gemma2", "p-eagle"), ("gemma3", "p-eagle")],
)
def test_two_engines(name: str, method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second engine is built and answers during a pass of the first one."""
    pair = drafting_pair(name)
    right = expected(pair)
    others: list[list[list[int]]] = []
    other: Method = "none" if method == "p-eagle" else "p-eagle"
    run_inside_passes(monkeypatch, lambda: others.append(answers(pair, other)))
    assert answers(pair, method) == right
    assert others == [right]


def test_generate_beside_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = drafting_pair("gemma2")
    right = expected(pair)
    monkeypatch.setattr(LoadedPair, "decode", lambda self, ids: "")
    generated: list[list[int]] = []

    def generate() -> None:
        answer = pair.generate(PROMPTS[1], k=2, method="p-eagle", max_tokens=COUNT, **SAMPLED)
        generated.append(answer.token_ids)

    run_inside_passes(monkeypatch, generate)
    assert answers(pair, "p-eagle") == right
    assert len(generated) == 1
    assert generated[0] == right[1][: len(generated[0])]


@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "gemma2"])
def test_generate_in_several_threads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads share an engine, whose steps run one after the other."""
    pair = drafting_pair(name)
    monkeypatch.setattr(LoadedPair, "decode", lambda self, ids: "")

    def generate(index: int) -> list[int]:
        options = {"temperature": 1.0, "seed": index, "max_tokens": 30}
        return pair.generate(PROMPTS[index], k=3, method="p-eagle", **options).token_ids

    right = [generate(i) for i in range(3)]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(generate, range(3))) == right


@pytest.mark.parametrize("name", ["qwen3-moe", "gemma2"])
def test_engines_with_threads(name: str) -> None:
    """Both engines run in their own threads, as in a server."""
    pair = drafting_pair(name)
    right = expected(pair)
    engines = [
        Engine(pair, EngineConfig(method=method, k=3, max_batch=4, kv_tokens=400))
        for method in ("none", "p-eagle")
    ]
    streams = [[engine.add(ids, **SETTINGS) for ids in PROMPTS] for engine in engines]
    for engine_streams in streams:
        steps = [[piece.step for piece in stream if piece.step] for stream in engine_streams]
        assert [tokens_of(answer) for answer in steps] == right
    for engine in engines:
        engine.close()


def test_taps_of_passes_in_two_threads() -> None:
    target = make_target("gpt-oss")
    target.tap(AUX)
    ids = torch.arange(6, 20)
    right, short = target.forward(ids).hidden, target.forward(ids[:5]).hidden
    taps: list[torch.Tensor] = []

    def other_pass(*_: Any) -> None:
        if not taps:
            taps.append(torch.empty(0))
            thread = threading.Thread(target=lambda: taps.append(target.forward(ids[:5]).hidden))
            thread.start()
            thread.join()

    target.layers[4].register_forward_hook(other_pass)  # between two taps
    assert torch.equal(target.forward(ids).hidden, right)
    assert torch.equal(taps[1], short)


@pytest.mark.parametrize("name", ["llama", "gpt-oss", "gemma2"])
def test_an_engine_does_not_change_the_target(name: str) -> None:
    target = make_target(name)
    target.tap(AUX)
    before = target.model.config._attn_implementation
    verifier = build_verifier(target, 64)
    verifier.taps = (0, 2)
    assert target.model.config._attn_implementation == before
    assert target.aux_layer_ids == AUX
    assert target.forward(torch.arange(6, 12)).hidden.shape == (6, len(AUX) * target.hidden_size)


def pointers(model: torch.nn.Module) -> set[int]:
    return {x.data_ptr() for x in [*model.parameters(), *model.buffers()]}


def test_the_copy_of_the_model_has_no_weights_of_its_own() -> None:
    target = make_target("qwen3-moe")
    own = HFPagedTarget(target).model
    assert own is not target.model and pointers(own) == pointers(target.model)
    assert own.get_decoder().layers[0] is not target.layers[0]
    assert own.config is not target.model.config


@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_the_copy_of_a_fused_target_is_freed_at_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is freed by reference counts, because a server rarely collects the oldest generation."""
    copies: list[weakref.ref[Any]] = []
    own = Target.private_model

    def private_model(self: Target) -> Any:
        model = own(self)
        copies.append(weakref.ref(model))
        return model

    monkeypatch.setattr(Target, "private_model", private_model)
    gc.disable()
    try:
        build_verifier(make_target(name), 64)
        assert [copy() for copy in copies] == [None]
    finally:
        gc.enable()


def test_hooks_of_the_user_work_in_an_engine() -> None:
    target = make_target("qwen3-moe")
    right = tokens_of(reference_steps(pair_of(target), "none", PROMPTS[0], **SETTINGS))
    target.layers[2].mlp.register_forward_hook(lambda module, args, out: out * 0.5)
    patched = tokens_of(reference_steps(pair_of(target), "none", PROMPTS[0], **SETTINGS))
    assert patched != right
    [steps] = serve(engine_of(pair_of(target), "none"), [(PROMPTS[0], SETTINGS)])
    assert tokens_of(steps) == patched
