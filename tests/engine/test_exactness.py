"""Exact mode: in bfloat16 too, neither drafts nor other requests can change a token."""

from functools import cache

import pytest
import torch

from peagle.core import METHODS, Method
from peagle.engine import engine as engine_module
from peagle.engine.model.exactness import (
    C_ROW_MULTIPLES,
    PROBED_BLOCKS,
    exact_multiple,
    is_bit_equal,
    pad_rows,
    shares_prefixes,
    uses_c_kernels,
)
from peagle.engine.model.verifier import build_verifier
from peagle.engine.step.step_output import StepRecord
from peagle.errors import UserError
from peagle.kernels.row_pass import RowPass
from peagle.loaded import LoadedPair
from tests.support.cpu_features import needs_c
from tests.support.decoding import tokens_of
from tests.support.engines import (
    K,
    engine_of,
    pair_of,
    plant_drafts,
    serve,
    some_requests,
    steps_of,
)
from tests.support.tiny_models import CONFIGS, make_drafter, make_target

COUNT = 33  # crosses the ends of at least two pages
PAGE = 16
ASKED = some_requests(3, seed=17, max_tokens=COUNT, ignore_eos=True)[1:]  # of 25 and 36 tokens


@cache
def pair(name: str) -> LoadedPair:
    """In bfloat16."""
    target = make_target(name)
    target.model.to(torch.bfloat16)
    return pair_of(
        target,
        {
            "p-eagle": make_drafter(target, "p-eagle", 2),
            "eagle3": make_drafter(target, "eagle3", 1),
        },
    )


@cache
def alone(name: str) -> list[list[int]]:
    engine = engine_of(pair(name), "none", exact=True, page_size=PAGE, kv_tokens=600, max_batch=1)
    return [tokens_of(steps) for steps in serve(engine, ASKED)]


@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_the_same_tokens_with_and_without_drafts(method: Method) -> None:
    engine = engine_of(pair("llama"), method, exact=True, page_size=PAGE, kv_tokens=600)
    assert engine.exact and engine.loop.stepper.row_multiple in C_ROW_MULTIPLES
    assert [tokens_of(steps) for steps in serve(engine, ASKED)] == alone("llama")


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("llama", [True]),
        ("llama", [False, True, True]),
        *((name, [True, True, False]) for name in CONFIGS),
    ],
)
def test_whatever_is_accepted(name: str, right: list[bool]) -> None:
    engine = engine_of(pair(name), "p-eagle", exact=True, page_size=PAGE, kv_tokens=600)
    streams = [engine.add(ids, id=str(i), **options) for i, (ids, options) in enumerate(ASKED)]
    while engine.step():
        plant_drafts(engine, {str(i): answer for i, answer in enumerate(alone(name))}, right)
    assert [tokens_of(steps_of(stream)) for stream in streams] == alone(name)
    leading = right.index(False) if False in right else K
    assert 0.5 + leading < engine.metrics.acceptance_length <= 1 + K


@pytest.mark.parametrize("method", METHODS)
def test_no_request_is_preempted(method: Method) -> None:
    """Recomputing a preempted request would give other bits: it waits until its pages are free."""
    engine = engine_of(pair("llama"), method, exact=True, page_size=PAGE, kv_tokens=112)
    assert [tokens_of(steps) for steps in serve(engine, ASKED)] == alone("llama")
    assert not engine.loop.scheduler.preemptions


def test_the_same_seed_gives_the_same_tokens() -> None:
    asked = [
        (ids, {**options, "temperature": 1.0, "seed": i}) for i, (ids, options) in enumerate(ASKED)
    ]
    answers = []
    for method in METHODS:
        engine = engine_of(pair("llama"), method, exact=True, page_size=PAGE, kv_tokens=600)
        answers.append([tokens_of(steps) for steps in serve(engine, asked)])
    assert answers[0] == answers[1] == answers[2]


def test_it_is_refused_where_rows_depend_on_their_neighbors() -> None:
    """In transformers, the number of rows of an expert changes their bits, also in float32."""
    target = make_target("qwen3-moe", hidden_size=64, moe_intermediate_size=128)
    target.layers[0].mlp.register_forward_hook(lambda module, args, out: out * 0.8)  # not fused
    experts = pair_of(target)
    with pytest.raises(
        UserError,
        match=r"exact mode is not supported for 'tiny qwen3-moe'.*mixtures of experts.*float32",
    ):
        engine_of(experts, "none", exact=True)
    engine = engine_of(experts, "none")
    assert not engine.exact and engine.loop.stepper.row_multiple == 1
    assert [len(tokens_of(steps)) for steps in serve(engine, ASKED)] == [COUNT] * 2


def test_the_default_is_exact_in_half_precision_only() -> None:
    assert engine_of(pair("llama"), "none", exact=None).exact
    assert not engine_of(pair("llama"), "none").exact
    assert not engine_of(pair_of(make_target()), "none", exact=None).exact, (
        "float32 does not need it"
    )


def test_without_it_the_bits_differ() -> None:
    """The reason for exact mode: passes over one row and over a block are not bit-equal."""
    target = make_target()
    verifier = build_verifier(target, 300)
    assert not is_bit_equal(verifier, target, 64, 11, PROBED_BLOCKS, 1)


def test_large_blocks_are_probed_too() -> None:
    engine = engine_of(pair("llama"), "p-eagle", k=20, exact=True, page_size=PAGE, kv_tokens=600)
    assert [tokens_of(steps) for steps in serve(engine, ASKED)] == alone("llama")


def test_it_is_probed_and_not_assumed() -> None:
    """A target whose rows depend on the number of rows has no multiple."""
    target = pair("llama").target
    verifier = build_verifier(target, 300)
    assert exact_multiple(verifier, target, 64) in C_ROW_MULTIPLES
    forward = verifier.forward

    def depends_on_rows(ids, rows, kv_cache, logit_rows=None):
        logits, hidden = forward(ids, rows, kv_cache, logit_rows)
        return logits + rows.max_rows, hidden

    verifier.forward = depends_on_rows  # type: ignore[method-assign]
    assert exact_multiple(verifier, target, 64) is None


# The prefix cache.


@needs_c
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("int8", [False, True])
def test_a_shared_prefix_changes_no_bit(method: Method, int8: bool) -> None:
    """Every turn repeats the answer before it: its log-probabilities are those without a cache."""
    options = {"exact": True, "int8": int8, "page_size": PAGE, "kv_tokens": 1200}
    cached, plain = (
        engine_of(pair("llama"), method, prefix_caching=caching, **options)
        for caching in (True, False)
    )
    ids, _ = ASKED[0]
    for turn in range(4):
        streams = [
            engine.add(ids, max_tokens=COUNT, ignore_eos=True, logprobs=4)
            for engine in (cached, plain)
        ]
        for engine in (cached, plain):
            engine.drain()
        ours, theirs = ([piece for piece in stream if piece.step] for stream in streams)
        assert ours == theirs
        assert streams[1].cached_tokens == 0
        if turn:
            assert streams[0].cached_tokens == (len(ids) - 1) // PAGE * PAGE
        ids = [*ids, *tokens_of([piece.step for piece in ours if piece.step])]


def test_prefixes_are_shared_only_where_it_changes_no_bit(monkeypatch) -> None:
    target = pair("llama").target
    verifier = build_verifier(target, 300)
    assert shares_prefixes(verifier, target, 64) == uses_c_kernels(verifier)
    forward = verifier.forward

    def depends_on_rows(ids, rows, kv_cache, logit_rows=None):
        result = forward(ids, rows, kv_cache, logit_rows)
        if rows.max_rows > 100:  # No verify pass is that long, so that exact mode does not notice.
            kv_cache.values[1][rows.kv_slots] *= 2
        return result

    verifier.forward = depends_on_rows  # type: ignore[method-assign]
    assert exact_multiple(verifier, target, 64) is not None
    assert not shares_prefixes(verifier, target, 64)
    monkeypatch.setattr(engine_module, "shares_prefixes", lambda *_: False)
    engine = engine_of(pair("llama"), "none", exact=True)
    assert not engine.loop.scheduler.allocator.caching


def test_passes_are_padded() -> None:
    ids = torch.tensor([7, 8, 9])
    positions = torch.arange(5, 8)
    one = torch.ones(1, dtype=torch.int32)
    rows = RowPass(positions, positions, one[None], one * 0, one * 3, one * 5, 3, 16)
    padded_ids, padded = pad_rows(ids, rows, 4)
    assert padded_ids.tolist() == [7, 8, 9, 0]
    assert padded.positions.tolist() == [5, 6, 7, 0]
    assert padded.kv_slots.tolist() == [5, 6, 7, -1]
    assert pad_rows(ids, rows, 3) == (ids, rows)


@needs_c
@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_lossless_in_int8_too(method: Method) -> None:
    """Neither drafts nor other requests change a token of the int8 target."""
    options = {"exact": True, "int8": True, "page_size": PAGE, "kv_tokens": 600}
    plain, drafted = (engine_of(pair("llama"), used, **options) for used in ("none", method))
    answers = [[tokens_of(steps) for steps in serve(engine, ASKED)] for engine in (plain, drafted)]
    assert answers[0] == answers[1] and all(len(answer) == COUNT for answer in answers[0])
    assert drafted.status()["int8"] and drafted.exact


@needs_c
@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_int8_rounds_weights_of_float32(method: Method) -> None:
    """Which need not be exact in bfloat16; no exact mode is needed."""
    target = make_target()
    pair = pair_of(target, {method: make_drafter(target, method, 2 if method == "p-eagle" else 1)})
    plain, drafted, other = (
        engine_of(pair, used, kv_tokens=600, int8=int8)
        for used, int8 in (("none", True), (method, True), ("none", False))
    )
    answers = [[tokens_of(steps) for steps in serve(engine, ASKED)] for engine in (plain, drafted)]
    assert answers[0] == answers[1] and all(len(answer) == COUNT for answer in answers[0])
    assert drafted.weights == "int8" and other.weights != "int8"


def test_int8_is_refused_where_it_is_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    half = make_target()
    half.model.to(torch.float16)
    with pytest.raises(UserError, match=r"in bfloat16 or float32, not float16: set `dtype` to one"):
        engine_of(pair_of(half), "none", int8=True)
    monkeypatch.setattr("peagle.engine.sizing.library", lambda: None)
    with pytest.raises(UserError, match=r"int8 needs the C kernels \(.*\): leave out `int8`"):
        engine_of(pair("llama"), "none", int8=True)


@needs_c
def test_int8_is_for_llama_like_targets() -> None:
    with pytest.raises(
        UserError, match=r"int8 is not supported for 'tiny gemma2', whose layers are not Llama-like"
    ):
        engine_of(pair("gemma2"), "none", int8=True)


def test_each_pass_has_its_own_duration() -> None:
    """Exact mode runs one pass per request: adaptive drafting compares their durations."""
    options = {"page_size": PAGE, "kv_tokens": 600, "max_batch": 4}
    engine = engine_of(pair("llama"), "p-eagle", "auto", exact=True, **options)
    records: list[StepRecord] = []
    engine.on_step(records.append)
    serve(engine, some_requests(4, seed=3, max_tokens=COUNT, ignore_eos=True))
    assert len(records) > 20 and all(record.batch == 1 for record in records)
    for record in records:
        assert record.verify_seconds is not None and record.draft_seconds is not None
        assert record.seconds >= record.verify_seconds + record.draft_seconds
