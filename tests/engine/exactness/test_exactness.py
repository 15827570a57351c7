"""Exact mode: neither drafts nor other requests change a token, also in bfloat16."""

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peagle.core import METHODS, Method
from peagle.draft_shape import DraftShape
from peagle.engine import EngineConfig
from peagle.engine.model import batch_invariance, weight
from peagle.engine.model.batch_invariance import (
    InvarianceProbe,
    enable_batch_invariance,
    launch_invariant_passes,
)
from peagle.engine.model.exactness import (
    PROBED_BLOCKS,
    ROW_MULTIPLES,
    exact_multiple,
    is_bit_equal,
    pad_rows,
)
from peagle.engine.model.fused_llama import FusedLlamaTarget
from peagle.engine.model.verifier import build_verifier
from peagle.engine.step import exact_mode
from peagle.engine.step.exact_mode import expects_exact_mode
from peagle.engine.step.step_output import StepRecord
from peagle.errors import UserError
from peagle.kernels.row_pass import RowPass
from peagle.kernels.triton.batch_invariant.vendor_gemm import VendorRows
from peagle.loaded import LoadedPair
from peagle.target.gguf.modules import weight_bytes
from tests.support.engine.decoding import tokens_of
from tests.support.engine.engines import (
    K,
    engine_of,
    pair_of,
    plant_drafts,
    serve,
    some_requests,
    steps_of,
)
from tests.support.kernels.cpu_features import needs_c
from tests.support.models.tiny_models import CONFIGS, ENGINE_PATHS, make_drafter, make_target

COUNT = 33  # An answer crosses the ends of at least two pages.
PAGE = 16
# Prompts of 25 and 36 tokens.
REQUESTS = some_requests(3, seed=17, max_tokens=COUNT, ignore_eos=True)[1:]


@cache
def pair(name: str) -> LoadedPair:
    """A target in bfloat16 with drafters."""
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
def expected_answers(name: str) -> list[list[int]]:
    engine = engine_of(pair(name), "none", exact=True, page_size=PAGE, kv_tokens=600, max_batch=1)
    return [tokens_of(steps) for steps in serve(engine, REQUESTS)]


@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_the_same_tokens_with_and_without_drafts(method: Method) -> None:
    engine = engine_of(pair("llama"), method, exact=True, page_size=PAGE, kv_tokens=600)
    assert engine.exact and engine.loop.stepper.row_multiple in (1, *ROW_MULTIPLES)
    assert [tokens_of(steps) for steps in serve(engine, REQUESTS)] == expected_answers("llama")


# Batches: requests share passes where kernels allow it.

MANY_REQUESTS = [
    (ids, {"max_tokens": 20, "ignore_eos": True, **sampling})
    for i, (ids, _) in enumerate(some_requests(9, seed=23))
    for sampling in [{} if i % 2 else {"temperature": 0.9, "top_p": 0.95, "seed": i}]
]

DRAFTING: list[tuple[Method, int, int]] = [  # method, K, nodes of the tree
    ("none", 1, 0),
    ("ngram", 4, 0),
    ("eagle3", 3, 0),
    ("p-eagle", 7, 0),
    ("p-eagle", 4, 12),
    ("p-eagle", 7, 40),
]


@cache
def many_expected(name: str) -> list[list[int]]:
    """Answers of single requests, without drafts and without a prefix cache."""
    options = {"page_size": PAGE, "kv_tokens": 600, "prefix_caching": False, "max_batch": 1}
    engine = engine_of(pair(name), "none", exact=True, prefill_chunk=600, **options)
    return [tokens_of(serve(engine, [request])[0]) for request in MANY_REQUESTS]


@needs_c
@pytest.mark.parametrize(
    ("name", "method", "k", "tree"),
    [
        # Head norms, sinks and experts are the same to every method: K = 7, a chain and a tree.
        pytest.param(
            *(name, method, k, tree),
            marks=[] if k == 7 or name == "llama" else pytest.mark.slow,
        )
        for name in ("llama", "qwen3", "qwen3-moe", "gpt-oss", "mixtral")
        for method, k, tree in DRAFTING
    ],
)
def test_batches_do_not_change_tokens(name: str, method: Method, k: int, tree: int) -> None:
    """Staggered arrival, chunks of prompts, shared prefixes, sampling, and pages that run out."""
    kv_tokens = 208 if tree == 40 else 176 if method == "ngram" else 144
    options = {"page_size": PAGE, "kv_tokens": kv_tokens, "max_batch": 8}
    engine = engine_of(pair(name), method, k, tree=tree, exact=True, **options)
    assert engine.exact_mode == "batched"
    batches: list[int] = []
    engine.on_step(lambda record: batches.append(record.batch))
    assert [tokens_of(steps) for steps in serve(engine, MANY_REQUESTS)] == many_expected(name)
    assert max(batches) > 2
    assert engine.status()["preemptions"] > 0 and engine.status()["prefix_hits"] > 0


@needs_c
def test_batches_with_adaptive_drafting() -> None:
    options = {"page_size": PAGE, "kv_tokens": 900, "max_batch": 8}
    engine = engine_of(pair("llama"), "p-eagle", "auto", tree=12, exact=True, **options)
    assert [tokens_of(steps) for steps in serve(engine, MANY_REQUESTS)] == many_expected("llama")


def has_one_request_with_a_long_context(rows: RowPass) -> bool:
    return len(rows.row_counts) == 1 and int(rows.first_positions[0]) > 200


def has_one_tree_only(rows: RowPass) -> bool:
    """Whether the pass has only a tree, of the request with the longest prompt."""
    return rows.tree_masks is not None and has_one_request_with_a_long_context(rows)


@needs_c
@pytest.mark.parametrize("shape", [DraftShape(7, 7), DraftShape(5, 20)])
def test_the_probe_detects_dependence_on_the_batch(
    shape: DraftShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = pair("llama").target
    verifier = build_verifier(target, 300)
    assert enable_batch_invariance(verifier, target, PAGE, shape) is None
    forward = verifier.forward

    def changed(condition):
        def run(ids, rows, kv_cache, logit_rows=None):
            logits, hidden = forward(ids, rows, kv_cache, logit_rows)
            return logits + condition(rows), hidden

        verifier.forward = run  # type: ignore[method-assign]
        return enable_batch_invariance(verifier, target, PAGE, shape)

    assert "prompts" in str(changed(lambda rows: rows.max_rows > 100))
    assert "batch" in str(changed(lambda rows: len(rows.row_counts) > 20))
    assert "batch" in str(changed(has_one_request_with_a_long_context))
    if not shape.is_chain:
        assert "tree" in str(changed(lambda rows: rows.tree_masks is not None))
        assert "tree" in str(changed(has_one_tree_only))


@needs_c
def test_the_probe_detects_a_softmax_that_depends_on_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = pair("llama").target
    verifier = build_verifier(target, 300)
    monkeypatch.setattr(batch_invariance, "softmax", lambda x: x.softmax(-1) + len(x) * 1e-3)
    assert "softmax" in str(enable_batch_invariance(verifier, target, PAGE, DraftShape(1, 1)))


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("llama", [True]),
        ("llama", [False, True, True]),
        *(
            pytest.param(
                *(name, [True, True, False]),
                marks=[] if name in (*ENGINE_PATHS, "gpt-oss") else pytest.mark.slow,
            )
            for name in CONFIGS
        ),
    ],
)
def test_accepted_drafts_do_not_change_answers(name: str, right: list[bool]) -> None:
    engine = engine_of(pair(name), "p-eagle", exact=True, page_size=PAGE, kv_tokens=600)
    streams = [engine.add(ids, id=str(i), **options) for i, (ids, options) in enumerate(REQUESTS)]
    while engine.step():
        plant_drafts(
            engine, {str(i): answer for i, answer in enumerate(expected_answers(name))}, right
        )
    assert [tokens_of(steps_of(stream)) for stream in streams] == expected_answers(name)
    leading = right.index(False) if False in right else K
    assert 0.5 + leading < engine.metrics.acceptance_length <= 1 + K


@pytest.mark.parametrize("method", METHODS)
def test_requests_with_own_passes_are_not_preempted(
    method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recomputing a preempted request would change bits, so requests wait for all their pages."""
    disable_batch_invariance(monkeypatch)
    engine = engine_of(pair("llama"), method, exact=True, page_size=PAGE, kv_tokens=112)
    assert engine.exact_mode == "one by one"
    batches: list[int] = []
    engine.on_step(lambda record: batches.append(record.batch))
    answers = [tokens_of(steps) for steps in serve(engine, REQUESTS)]
    plain = engine_of(pair("llama"), "none", exact=True, page_size=PAGE, kv_tokens=112)
    assert answers == [tokens_of(steps) for steps in serve(plain, REQUESTS)]
    assert not engine.loop.scheduler.preemptions and set(batches) == {1}
    assert not engine.loop.scheduler.allocator.caching


def disable_batch_invariance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the probe fail, as for targets without batch-invariant kernels."""
    monkeypatch.setattr(
        "peagle.engine.step.exact_mode.enable_batch_invariance",
        lambda *_, **__: "rows depend on the batch",
    )


def test_requests_with_own_passes_cannot_draft_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    disable_batch_invariance(monkeypatch)
    with pytest.raises(UserError, match=r"rows depend on the batch\. Set `tree` to 0, or leave"):
        engine_of(pair("llama"), "p-eagle", 4, tree=12, exact=True)
    assert not engine_of(pair("llama"), "p-eagle", 4, tree=12, exact=None).exact


def test_requests_with_own_passes_replace_the_default_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU drafts trees by default; without batch invariance, the default is a chain."""
    disable_batch_invariance(monkeypatch)
    monkeypatch.setattr("peagle.engine.sizing.max_draft_shape", lambda *_: DraftShape(4, 12))
    engine = engine_of(pair("llama"), "p-eagle", "auto", exact=True)
    assert engine.exact_mode == "one by one"
    assert engine.max_shape == engine.drafter_shape == DraftShape(4, 4)


def test_the_same_seed_gives_the_same_tokens() -> None:
    requests = [
        (ids, {**options, "temperature": 1.0, "seed": i})
        for i, (ids, options) in enumerate(REQUESTS)
    ]
    answers = []
    for method in METHODS:
        engine = engine_of(pair("llama"), method, exact=True, page_size=PAGE, kv_tokens=600)
        answers.append([tokens_of(steps) for steps in serve(engine, requests)])
    assert all(answer == answers[0] for answer in answers)


def test_exact_mode_is_refused_if_rows_depend_on_the_batch() -> None:
    """In transformers, the number of rows of an expert changes their bits, even in float32."""
    target = make_target("qwen3-moe", hidden_size=64, moe_intermediate_size=128)
    # The hook prevents fused layers.
    target.layers[0].mlp.register_forward_hook(lambda module, args, out: out * 0.8)
    experts = pair_of(target)
    with pytest.raises(
        UserError,
        match=r"exact mode is not supported for 'tiny qwen3-moe': its layers run through.*float32",
    ):
        engine_of(experts, "none", exact=True)
    engine = engine_of(experts, "none")
    assert not engine.exact and engine.loop.stepper.row_multiple == 1
    assert [len(tokens_of(steps)) for steps in serve(engine, REQUESTS)] == [COUNT] * 2


# The default: exact mode in batches if it costs little.


@needs_c
def test_the_default_is_exact_in_batches() -> None:
    engine = engine_of(pair("llama"), "p-eagle", page_size=PAGE, kv_tokens=600)
    batches: list[int] = []
    engine.on_step(lambda record: batches.append(record.batch))
    assert [tokens_of(steps) for steps in serve(engine, REQUESTS)] == expected_answers("llama")
    assert engine.status()["exact_mode"] == "batched" and max(batches) == 2
    assert engine.status()["exact_reason"] is None
    turned_off = engine_of(pair("llama"), "p-eagle", exact=False).status()
    assert (turned_off["exact"], turned_off["exact_reason"]) == (False, "it is turned off")


@pytest.mark.parametrize("one_by_one", [True, False])
def test_the_default_is_not_exact_in_float32(one_by_one: bool) -> None:
    """In float32, near ties are unlikely."""
    engine = engine_of(pair_of(make_target()), "none", one_by_one=one_by_one)
    assert engine.exact_mode is None and "exact" not in engine.startup.as_dict()
    assert "float32" in engine.status()["exact_reason"]


@pytest.mark.parametrize(("one_by_one", "mode"), [(True, "one by one"), (False, None)])
def test_own_passes_by_default_only_if_allowed(one_by_one: bool, mode: str | None) -> None:
    """Targets that run through transformers have no batch-invariant kernels."""
    engine = engine_of(pair("gemma2"), "none", one_by_one=one_by_one)
    status = engine.status()
    assert (status["exact"], status["exact_mode"]) == (mode is not None, mode)
    assert status["exact_reason"].startswith("its layers run through transformers")
    assert engine.loop.scheduler.allocator.caching == (mode is None)
    assert engine_of(pair("gemma2"), "none", one_by_one=one_by_one, exact=True).exact


def test_the_default_follows_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    disable_batch_invariance(monkeypatch)
    assert engine_of(pair("llama"), "p-eagle", max_batch=1).exact_mode is None
    engine = engine_of(pair("llama"), "p-eagle", max_batch=1, one_by_one=True)
    assert engine.exact_mode == "one by one"


@needs_c
@pytest.mark.parametrize("one_by_one", [True, False])
def test_large_targets_on_a_cpu_are_not_probed_by_default(
    one_by_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = weight_bytes(pair("llama").target.model)
    probes = count_probes(monkeypatch)
    monkeypatch.setattr(exact_mode, "MAX_DEFAULT_PROBE_BYTES", limit - 1)
    engine = engine_of(pair("llama"), "p-eagle", k=23, one_by_one=one_by_one)
    assert engine.exact_mode is None and not probes
    assert engine_of(pair("llama"), "p-eagle", k=23, one_by_one=one_by_one, exact=True).exact
    assert len(probes) == 1
    monkeypatch.setattr(exact_mode, "MAX_DEFAULT_PROBE_BYTES", limit)
    engine = engine_of(pair("llama"), "p-eagle", k=23, one_by_one=one_by_one)
    assert engine.exact_mode == "batched"


def test_large_targets_without_c_kernels_keep_their_own_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their bits depend on the passes, for any size of the target."""
    monkeypatch.setattr(exact_mode, "MAX_DEFAULT_PROBE_BYTES", 0)
    assert engine_of(pair("gemma2"), "none", one_by_one=True).exact_mode == "one by one"


def count_probes(monkeypatch: pytest.MonkeyPatch) -> list[InvarianceProbe]:
    """A list that gets every probe that runs from now on."""
    probes: list[InvarianceProbe] = []
    difference = InvarianceProbe.difference

    def record(probe: InvarianceProbe) -> str | None:
        probes.append(probe)
        return difference(probe)

    monkeypatch.setattr(InvarianceProbe, "difference", record)
    return probes


@pytest.mark.parametrize("quantized", [None, "fp8", "int8", "int4", "mixed"])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_gpus_and_formats_without_measurements_are_not_exact_in_batches_by_default(
    capability: tuple[int, int], quantized: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    on_gpu: Any = SimpleNamespace(
        dtype=torch.bfloat16, device=torch.device("cuda", 1), format=quantized
    )
    measured = capability == (9, 0) and quantized is None
    assert expects_exact_mode(EngineConfig(), on_gpu) == measured
    assert expects_exact_mode(EngineConfig(one_by_one=True), on_gpu)
    assert expects_exact_mode(EngineConfig(exact=True), on_gpu)
    assert not expects_exact_mode(EngineConfig(exact=False), on_gpu)


@pytest.mark.parametrize("quantized", [None, "fp8", "int8"])
def test_quantized_targets_on_a_cpu_are_exact_in_batches_by_default(quantized: str | None) -> None:
    on_cpu: Any = SimpleNamespace(
        dtype=torch.bfloat16, device=torch.device("cpu"), format=quantized
    )
    assert expects_exact_mode(EngineConfig(), on_cpu)


def test_bits_differ_without_exact_mode() -> None:
    """The reason for exact mode: passes over one row and over a block are not bit-equal."""
    target = make_target()
    verifier = build_verifier(target, 300)
    assert not is_bit_equal(verifier, target, 64, 11, PROBED_BLOCKS, 1)


def test_large_blocks_are_probed_too() -> None:
    engine = engine_of(pair("llama"), "p-eagle", k=20, exact=True, page_size=PAGE, kv_tokens=600)
    assert [tokens_of(steps) for steps in serve(engine, REQUESTS)] == expected_answers("llama")


def test_the_row_multiple_is_probed() -> None:
    """A target whose rows depend on the number of rows has no multiple."""
    target = pair("llama").target
    verifier = build_verifier(target, 300)
    assert exact_multiple(verifier, target, 64) in ROW_MULTIPLES
    forward = verifier.forward

    def depends_on_rows(ids, rows, kv_cache, logit_rows=None):
        logits, hidden = forward(ids, rows, kv_cache, logit_rows)
        return logits + rows.max_rows, hidden

    verifier.forward = depends_on_rows  # type: ignore[method-assign]
    assert exact_multiple(verifier, target, 64) is None


def test_all_rows_of_a_block_are_compared() -> None:
    target = pair("llama").target
    verifier = build_verifier(target, 300)
    forward = verifier.forward

    def with_another_last_row(ids, rows, kv_cache, logit_rows=None):
        logits, hidden = forward(ids, rows, kv_cache, logit_rows)
        if rows.max_rows == 16:
            logits[15] += 1
        return logits, hidden

    verifier.forward = with_another_last_row  # type: ignore[method-assign]
    assert exact_multiple(verifier, target, 64) is None


def test_a_context_too_short_for_the_probe_proves_nothing() -> None:
    target = make_target(max_position_embeddings=16)
    assert exact_multiple(build_verifier(target, 16), target, 64) is None


@pytest.mark.parametrize("supported", [True, False])
def test_compile_passes_do_not_change_the_layers(
    supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight, "supports_invariant_gemm", lambda *_: supported)
    target = pair("llama").target
    verifier = build_verifier(target, 300)
    assert isinstance(verifier, FusedLlamaTarget)
    verifier.cpu_layers = None
    modes: list[bool] = []

    def run_all(probe: InvarianceProbe) -> None:
        modes.append(verifier.batch_invariant)

    monkeypatch.setattr(InvarianceProbe, "run_all", run_all)
    monkeypatch.setattr(VendorRows, "launch_trials", lambda *_: None)
    launch_invariant_passes(verifier, target, PAGE, DraftShape(3, 3))
    assert modes == ([True] if supported or verifier.lm_head.matrix is not None else [])
    assert not verifier.batch_invariant
    assert not any(layer.attention.batch_invariant for layer in verifier.layers)


# The prefix cache.


@needs_c
@pytest.mark.parametrize(
    ("method", "int8"),
    [  # Weights of 8 bits work alike with every method.
        pytest.param(method, int8, marks=pytest.mark.slow if int8 and method != "p-eagle" else [])
        for method in METHODS
        for int8 in (False, True)
    ],
)
def test_a_shared_prefix_does_not_change_logprobs(method: Method, int8: bool) -> None:
    """Turns of a conversation have the log-probabilities of an engine without a prefix cache."""
    options = {"exact": True, "int8": int8, "page_size": PAGE, "kv_tokens": 1200}
    cached, plain = (
        engine_of(pair("llama"), method, prefix_caching=caching, **options)
        for caching in (True, False)
    )
    ids, _ = REQUESTS[0]
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
@pytest.mark.parametrize(("method", "tree"), [("p-eagle", 0), ("p-eagle", 12), ("eagle3", 0)])
def test_int8_is_lossless(method: Method, tree: int) -> None:
    """Neither drafts nor other requests change a token of an int8 target."""
    options = {"exact": True, "int8": True, "page_size": PAGE, "kv_tokens": 600}
    plain = engine_of(pair("llama"), "none", **options)
    drafted = engine_of(pair("llama"), method, tree=tree, **options)
    answers = [
        [tokens_of(steps) for steps in serve(engine, REQUESTS)] for engine in (plain, drafted)
    ]
    assert answers[0] == answers[1] and all(len(answer) == COUNT for answer in answers[0])
    assert drafted.status()["int8"] and drafted.exact


@needs_c
@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_int8_rounds_weights_of_float32(method: Method) -> None:
    """The weights need not be exact in bfloat16, and answers are lossless without exact mode."""
    target = make_target()
    pair = pair_of(target, {method: make_drafter(target, method, 2 if method == "p-eagle" else 1)})
    plain, drafted, other = (
        engine_of(pair, used, kv_tokens=600, int8=int8)
        for used, int8 in (("none", True), (method, True), ("none", False))
    )
    answers = [
        [tokens_of(steps) for steps in serve(engine, REQUESTS)] for engine in (plain, drafted)
    ]
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
def test_int8_needs_llama_like_targets() -> None:
    with pytest.raises(
        UserError, match=r"int8 is not supported for 'tiny gemma2', whose layers are not Llama-like"
    ):
        engine_of(pair("gemma2"), "none", int8=True)


def test_each_pass_has_its_own_duration(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one request per pass, adaptive drafting compares durations of single passes."""
    disable_batch_invariance(monkeypatch)
    options = {"page_size": PAGE, "kv_tokens": 600, "max_batch": 4}
    engine = engine_of(pair("llama"), "p-eagle", "auto", exact=True, **options)
    records: list[StepRecord] = []
    engine.on_step(records.append)
    serve(engine, some_requests(4, seed=3, max_tokens=COUNT, ignore_eos=True))
    assert len(records) > 20 and all(record.batch == 1 for record in records)
    for record in records:
        assert record.verify_seconds is not None and record.draft_seconds is not None
        assert record.seconds >= record.verify_seconds + record.draft_seconds
