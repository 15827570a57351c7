"""Deferred rows of the drafter: drafts equal the reference after steps without drafts."""

from itertools import cycle

import pytest
import torch

from peagle.core import DRAFTER_METHODS, Method
from peagle.draft_shape import NO_DRAFT, DraftShape
from peagle.engine.model.drafting import DraftRunner
from peagle.engine.policy.draft_policy import DraftChoice, FixedPolicy
from peagle.loaded import LoadedPair
from peagle.reference import reference
from tests.support.engine.decoding import tokens_of
from tests.support.engine.engines import K, engine_of, small, some_requests

CHAIN = DraftShape(K, K)
SHAPES = [*[NO_DRAFT] * 11, *[CHAIN] * 3, NO_DRAFT, CHAIN]
TOKENS = 40


class CyclicPolicy(FixedPolicy):
    def __init__(self, shapes: list[DraftShape]) -> None:
        self.shapes = cycle(shapes)

    def choose(self, *arguments: object, **options: object) -> DraftChoice:
        return DraftChoice(next(self.shapes), "in turn")


def reference_drafts(pair: LoadedPair, method: Method, ids: list[int]) -> list[int]:
    drafter = pair.drafter(method)
    pair.target.tap(drafter.config.aux_layer_ids or ())
    tokens = torch.tensor(ids)
    hidden = pair.target.forward(tokens[:-1]).hidden
    return reference.propose(drafter, hidden, tokens, K).tolist()


@pytest.mark.parametrize("method", DRAFTER_METHODS)
def test_drafts_after_steps_without_drafts(method: Method) -> None:
    """Four requests with common prefixes, and one whose prompt is the text of the first."""
    pair = small()
    engine = engine_of(pair, method, kv_tokens=400)
    engine.loop.drafts.policy = CyclicPolicy(SHAPES)
    texts: dict[str, list[int]] = {}
    compared = 0

    def run(prompts: list[list[int]]) -> None:
        nonlocal compared
        streams = [engine.add(ids, max_tokens=TOKENS, ignore_eos=True) for ids in prompts]
        texts.update({stream.id: ids for stream, ids in zip(streams, prompts, strict=True)})
        while engine.step():
            for stream in streams:
                tokens = tokens_of(piece.step for piece in stream.poll() if piece.step)
                texts[stream.id] = texts[stream.id] + tokens
                state = engine.loop.states.get(stream.id)
                if not tokens or state is None or state.draft_shape != CHAIN:
                    continue
                drafted = engine.loop.stepper.slots.trees.chain[state.slot, :K].tolist()
                assert drafted == reference_drafts(pair, method, texts[stream.id])
                compared += 1

    run([ids for ids, _ in some_requests(4, seed=2)])
    run([next(iter(texts.values()))])
    assert engine.loop.scheduler.allocator.hit_tokens >= TOKENS // 2
    assert compared > 40


@pytest.mark.parametrize("method", DRAFTER_METHODS)
def test_the_drafter_runs_once_per_page(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []
    draft = DraftRunner.draft
    monkeypatch.setattr(DraftRunner, "draft", lambda *args: passes.append(1) or draft(*args))
    engine = engine_of(small(), method)
    engine.loop.drafts.policy = CyclicPolicy([NO_DRAFT])
    engine.add([7, 8, 9, 10, 11], max_tokens=TOKENS, ignore_eos=True)
    engine.drain()
    assert engine.metrics.steps == TOKENS - 1
    assert 0 < len(passes) <= TOKENS // engine.loop.scheduler.allocator.page_size + 1
