"""The outlook: what a drafter says its drafts are worth reaches whoever chooses the form, and is about right."""

import copy
import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from peagle.catalog.pair import Pair, TargetSource
from peagle.draft_shape import DraftShape
from peagle.drafter.branching import Branching
from peagle.engine import Engine, EngineConfig
from peagle.engine.model.drafting import DraftRunner
from peagle.engine.policy.adaptive import DraftChoice, FixedPolicy
from peagle.loaded import LoadedPair
from tests.support.training import prompts, trained

K = 4


class Listening(FixedPolicy):
    """Remembers what it was told."""

    def __init__(self, tree: DraftShape) -> None:
        super().__init__(tree)
        self.told: list[Sequence[float] | None] = []

    def choose(
        self,
        batch: int,
        outlook: Sequence[float] | None = None,
        chains: bool = False,
        timed: bool = True,
    ) -> DraftChoice:
        self.told.append(outlook)
        return super().choose(batch, outlook, chains, timed)


@pytest.mark.parametrize(("rung", "nodes"), [("dependency", K), ("all", K), ("dependency", 12)])
def test_it_reaches_whoever_chooses(rung: str, nodes: int) -> None:
    one = trained("p-eagle", 48, rung)
    drafter = copy.deepcopy(one.drafter)
    drafter.config = replace(drafter.config, calibration=(4.0,))
    pair = LoadedPair(Pair("tiny", TargetSource(()), {}), one.target, {"p-eagle": drafter})
    engine = Engine(
        pair,
        EngineConfig(k=K, tree=nodes if nodes > K else 0, max_batch=1, kv_tokens=512, thread=False),
    )
    engine.loop.policy = policy = Listening(engine.max_shape)
    for prompt in prompts(8) * 2:
        engine.add(prompt, max_tokens=40, ignore_eos=True)
        engine.drain()
    known = [told for told in policy.told if told is not None]
    assert len(known) > 0.7 * engine.metrics.steps
    assert all(len(told) == K and 0 < min(told) <= max(told) < 1 for told in known)


@pytest.mark.parametrize("rung", ["dependency", "all"])
def test_it_is_the_probability_of_each_draft_behind_the_one_before(rung: str) -> None:
    drafter = copy.deepcopy(trained("p-eagle", 48, rung).drafter)
    drafter.config = replace(drafter.config, calibration=(2.0, 1.5, 0.5))
    drafting = DraftRunner.__new__(DraftRunner)
    drafting.drafter, drafting.branching = drafter, Branching(drafter)
    normed = torch.randn(
        3, K, drafter.config.hidden_size, generator=torch.Generator().manual_seed(0)
    )
    rows = normed.flatten(0, 1)
    ids, logp = drafting.branching(rows, drafter.logits(rows), K)
    chain = drafter.drafts(normed)
    found = drafting.outlook(normed, ids, logp, chain)
    for b, k in itertools.product(range(3), range(K)):
        row, factor = normed[b, k], (2.0, 1.5, 0.5, 0.5)[k]
        plain = factor * drafter.logits(row[None])[0]
        if k:
            row = drafter.dependency(row[None], drafter.embed(chain[b, k - 1 : k]))[0]
        told = factor * drafter.logits(row[None])[0]
        inside = torch.zeros_like(plain, dtype=torch.bool).index_fill(0, ids[b, k], True)
        total = torch.where(inside, told, plain).logsumexp(0)
        at = int((drafter.target_ids == chain[b, k]).nonzero())
        odds = torch.special.logit((told[at] - total).exp())
        odds = odds + (drafter.confidence(row)[0] if drafter.confidence is not None else 0)
        assert found[b, k] == pytest.approx(float(odds.sigmoid()), abs=1e-4)


def test_a_plain_drafter_has_none() -> None:
    one = trained("p-eagle")
    pair = LoadedPair(Pair("tiny", TargetSource(()), {}), one.target, {"p-eagle": one.drafter})
    engine = Engine(pair, EngineConfig(k=K, max_batch=1, kv_tokens=512, thread=False))
    engine.loop.policy = policy = Listening(engine.max_shape)
    engine.add(prompts(1)[0], max_tokens=20)
    engine.drain()
    assert policy.told and not any(policy.told)
