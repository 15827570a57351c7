"""A sliding window in the attention of a drafter: equal drafts everywhere, and lossless answers."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from peagle.core import Method
from peagle.drafter import Drafter
from peagle.drafter.formats import checkpoint, compact, llama
from peagle.drafter.formats.speculators import VerifierConfig
from peagle.errors import UserError
from peagle.export.export import ExportFormat, export, same_drafts
from peagle.reference import reference
from peagle.reference.decode import decode
from peagle.reference.proposer import Verified, proposer_for
from peagle.target import Target
from peagle.train.data.attention_mask import build_mask
from peagle.train.data.chains import full_chains
from peagle.train.data.pack import BatchLayout, build_batch, pack_sequences
from peagle.train.objective.gradients import run_level
from peagle.train.objective.passes import DrafterPasses
from tests.support.engine.decoding import GREEDY, plain, tokens_of
from tests.support.engine.engines import engine_of, pair_of, reference_steps, serve
from tests.support.models.tiny_models import AUX, make_drafter

METHODS: list[Method] = ["p-eagle", "eagle3"]
WINDOW = 64
K = 4


def windowed_drafter(target: Target, method: Method, window: int | None = WINDOW) -> Drafter:
    layers = 3 if method == "p-eagle" else 1
    return make_drafter(target, method, layers, sliding_window=window)


def attentive_drafter(target: Target, method: Method) -> Drafter:
    """A drafter with strong attention, whose drafts depend on the window."""
    drafter = windowed_drafter(target, method)
    for name, weight in drafter.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            weight.data.mul_(30)
        elif "self_attn" in name:
            weight.data.mul_(8)
    return drafter


def features(target: Target, ids: Tensor) -> Tensor:
    target.tap(AUX)
    return target.forward(ids).hidden


@pytest.mark.parametrize("method", METHODS)
def test_the_reference_attends_to_the_window_only(target: Target, method: Method, prompt) -> None:
    """With one layer, rows before the window have no effect; the first row in it has one."""
    drafter = make_drafter(target, method, 1, sliding_window=WINDOW)
    ids = torch.tensor(prompt(120))
    g = features(target, ids[:-1])
    row = len(g) - 1  # predicts draft 1

    def output(changed: int) -> Tensor:
        hidden = drafter.combine_hidden_states(g)
        hidden[changed] += 1.0
        return reference.run_drafter(drafter, ids[1:], hidden)[0][row]

    unchanged = reference.run_drafter(drafter, ids[1:], drafter.combine_hidden_states(g))[0][row]
    assert torch.equal(output(row - WINDOW), unchanged)
    assert not torch.equal(output(row - WINDOW + 1), unchanged)


@pytest.mark.parametrize("method", METHODS)
def test_cached_drafts_equal_the_reference(target: Target, method: Method, prompt) -> None:
    drafter = windowed_drafter(target, method)
    target.tap(AUX)
    ids = prompt(100)
    cached = list(decode(target, proposer_for(drafter), ids, K, 30, GREEDY))
    slow = reference.decode(target, drafter, ids, K, 30, GREEDY)
    assert tokens_of(cached) == tokens_of(slow)[:30] == plain(target, ids, 30)
    assert [step.accepted for step in cached] == [step.accepted for step in slow][: len(cached)]


def reference_drafts(target: Target, drafter: Drafter, ids: list[int]) -> list[int]:
    tokens = torch.tensor(ids)
    return reference.propose(drafter, features(target, tokens[:-1]), tokens, K).tolist()


@pytest.mark.parametrize("method", METHODS)
def test_drafts_of_the_proposers(target: Target, method: Method, prompt) -> None:
    drafter = attentive_drafter(target, method)
    target.tap(AUX)
    proposer = proposer_for(drafter)
    drafts: list[list[int]] = []

    class Recorder:
        def propose(self, verified: Verified, k: int) -> Tensor:
            drafts.append(proposer.propose(verified, k).tolist())
            return torch.tensor(drafts[-1])

    ids = prompt(100)
    steps = list(decode(target, Recorder(), ids, K, 30, GREEDY))
    texts = [ids := [*ids, *step.tokens] for step in steps[:-1]]
    assert drafts == [reference_drafts(target, drafter, text) for text in texts]
    windowless = drafter.with_window(None)
    assert drafts != [reference_drafts(target, windowless, text) for text in texts]


@pytest.mark.parametrize("method", METHODS)
def test_drafts_of_the_engine(target: Target, method: Method, prompt) -> None:
    drafter = attentive_drafter(target, method)
    engine = engine_of(pair_of(target, {method: drafter}), method, K, kv_tokens=300)
    ids = prompt(100)
    stream = engine.add(ids, max_tokens=30, ignore_eos=True)
    [state] = engine.loop.states.values()
    compared = 0
    while engine.step():
        ids = ids + tokens_of(piece.step for piece in stream.poll() if piece.step)
        if len(ids) > 100 and state.slot is not None:
            drafted = engine.loop.stepper.slots.trees.chain[state.slot, :K].tolist()
            assert drafted == reference_drafts(target, drafter, ids)
            compared += 1
    assert compared > 5


@pytest.mark.parametrize("method", METHODS)
def test_steps_of_the_engine_equal_the_plain_loop(target: Target, method: Method, prompt) -> None:
    """Several requests with prompts in chunks have the steps of the plain loop."""
    pair = pair_of(target, {method: windowed_drafter(target, method)})
    requests = [(prompt(n), {"max_tokens": 40, "ignore_eos": True}) for n in (5, 60, 90, 130)]
    engine = engine_of(pair, method, K, kv_tokens=900)
    for steps, (ids, settings) in zip(serve(engine, requests), requests, strict=True):
        assert steps == reference_steps(pair, method, ids, K, **settings)
        assert tokens_of(steps) == plain(target, ids, 40)


@pytest.mark.parametrize("method", METHODS)
def test_a_window_of_the_context_length_has_no_effect(
    target: Target, method: Method, prompt
) -> None:
    pair = pair_of(target, {method: windowed_drafter(target, method, None)})
    ids = prompt(110)
    outputs = []
    for window in (None, target.context):
        engine = engine_of(pair, method, K, drafter_window=window, kv_tokens=300)
        stream = engine.add(ids, max_tokens=50, ignore_eos=True)
        engine.drain()
        caches = engine.loop.stepper.kv_cache
        outputs.append(([piece.step for piece in stream], [x.clone() for x in caches.keys]))
    assert outputs[0][0] == outputs[1][0]
    assert all(torch.equal(*keys) for keys in zip(outputs[0][1], outputs[1][1], strict=True))


def test_the_window_of_an_engine(target: Target, prompt) -> None:
    """`drafter_window` overrides the window in the drafter's config; 0 disables it."""
    drafter = windowed_drafter(target, "p-eagle")
    pair = pair_of(target, {"p-eagle": drafter})
    for given, used in ((None, WINDOW), (0, None), (100, 100)):
        engine = engine_of(pair, "p-eagle", K, drafter_window=given)
        runner = engine.loop.stepper.drafter
        assert {layer.attention.window for layer in runner.layers.layers} == {used}
    assert drafter.config.sliding_window == WINDOW
    with pytest.raises(UserError, match="`drafter_window` is 9"):
        engine_of(pair, "p-eagle", K, drafter_window=9)


@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_a_training_row_equals_the_inference_row(target: Target, method: Method, prompt) -> None:
    drafter = windowed_drafter(target, method)
    before, ids = np.array(prompt(50)), np.array(prompt(120))
    packed = pack_sequences([(before, before > 0), (ids, ids > 0)])
    consumed = np.array([3, 66, 80, 110])  # tokens before the first draft
    by_depth = method == "eagle3"
    layout = BatchLayout(by_depth, window=WINDOW)
    batch = build_batch(packed, full_chains(len(before) + consumed - 1, K), layout)
    g = torch.zeros(len(packed.ids), 3 * target.hidden_size)
    tokens = torch.from_numpy(ids)
    g[len(before) : len(before) + len(ids)] = features(target, tokens)
    passes = DrafterPasses(drafter)
    mask = build_mask(batch.context, batch.context, flex=False)
    normed, feedback, cache = passes("context", batch.next_ids, g, batch.positions, mask)
    rows = [normed[len(before) + consumed - 1][:, None]]
    drafts = torch.stack(
        [reference.propose(drafter, g[len(before) :][:n], tokens[: n + 1], K) for n in consumed]
    )
    keys = batch.context
    for depth, level in enumerate(batch.segments[0].levels):
        keys = keys + level.rows
        padding = len(level.rows) - level.num_unpadded
        fed = torch.cat([drafts[:, depth], drafts.new_zeros(padding)]) if by_depth else None
        mask = build_mask(level.rows, keys, False)
        normed, feedback, cache = run_level(passes, level, feedback, cache, mask, fed)
        rows.append(normed[: level.num_unpadded].unflatten(0, (len(consumed), -1)))
    assert torch.equal(drafter.drafts(torch.cat(rows, 1)), drafts)


def test_checkpoints_keep_the_window(target: Target, tmp_path: Path) -> None:
    drafter = windowed_drafter(target, "p-eagle")
    compact.save(drafter, tmp_path / "own", target)
    assert checkpoint.read(tmp_path / "own").config.sliding_window == WINDOW
    for to in ("vllm", "speculators"):
        folder = tmp_path / to
        export_drafter(drafter, folder, to)
        raw = checkpoint.read(folder).raw
        layers = raw if to == "vllm" else raw["transformer_layer_config"]
        # vLLM's Llama attention reads both keys, and ignores a window without `layer_types`.
        assert layers["sliding_window"] == WINDOW
        assert layers["layer_types"] == ["sliding_attention"] * 3
        assert checkpoint.read(folder).config.sliding_window == WINDOW


def export_drafter(drafter: Drafter, folder: Path, to: ExportFormat) -> None:
    export(drafter, folder, to, K, VerifierConfig("tiny", ["LlamaForCausalLM"]))


def test_the_export_check_detects_a_missing_window(target: Target) -> None:
    drafter = attentive_drafter(target, "p-eagle")
    assert same_drafts(drafter, drafter.with_window(WINDOW), K) == (36, 36)
    equal, total = same_drafts(drafter, drafter.with_window(None), K)
    assert equal < total


def test_windows_of_other_checkpoints() -> None:
    """A window without `layer_types` has no effect in vLLM, so it has none here."""
    sliding, full = "sliding_attention", "full_attention"
    assert llama.window_from_json({"sliding_window": 512}) is None
    assert llama.window_from_json({"sliding_window": 512, "layer_types": [full]}) is None
    assert llama.window_from_json({"sliding_window": 512, "layer_types": [sliding] * 2}) == 512
    with pytest.raises(UserError, match="layers all have the same sliding window"):
        llama.window_from_json({"sliding_window": 512, "layer_types": [full, sliding]})


def test_a_window_is_at_least_as_long_as_a_chain(target: Target) -> None:
    config = windowed_drafter(target, "p-eagle").config
    with pytest.raises(UserError, match="`sliding_window` is 63: use 64"):
        replace(config, sliding_window=63)
