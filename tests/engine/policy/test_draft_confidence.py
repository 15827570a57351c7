"""Draft confidence: the policy receives it, and its values match their definition."""

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
from peagle.engine.model.drafting import draft_confidence
from peagle.engine.policy.draft_policy import DraftChoice, FixedPolicy
from peagle.loaded import LoadedPair
from tests.support.train.training import prompts, trained

K = 4


class RecordingPolicy(FixedPolicy):
    """Records the draft confidence of every choice."""

    def __init__(self, shape: DraftShape) -> None:
        super().__init__(shape)
        self.recorded: list[Sequence[float] | None] = []

    def choose(
        self,
        batch: int,
        draft_confidence: Sequence[float] | None = None,
        chains_only: bool = False,
        timed: bool = True,
    ) -> DraftChoice:
        self.recorded.append(draft_confidence)
        return super().choose(batch, draft_confidence, chains_only, timed)


@pytest.mark.parametrize(
    ("extension", "nodes"), [("dependency", K), ("all", K), ("dependency", 12)]
)
def test_the_policy_receives_draft_confidence(extension: str, nodes: int) -> None:
    run = trained("p-eagle", 48, extension)
    drafter = copy.deepcopy(run.drafter)
    drafter.config = replace(drafter.config, calibration=(4.0,))
    pair = LoadedPair(Pair("tiny", TargetSource(()), {}), run.target, {"p-eagle": drafter})
    engine = Engine(
        pair,
        EngineConfig(k=K, tree=nodes if nodes > K else 0, max_batch=1, kv_tokens=512, thread=False),
    )
    engine.loop.drafts.policy = policy = RecordingPolicy(engine.max_shape)
    for prompt in prompts(5):
        engine.add(prompt, max_tokens=40, ignore_eos=True)
        engine.drain()
    confidences = [each for each in policy.recorded if each is not None]
    assert len(confidences) > 0.7 * engine.metrics.steps
    assert all(len(each) == K and 0 < min(each) <= max(each) < 1 for each in confidences)


@pytest.mark.parametrize("extension", ["dependency", "all"])
def test_confidence_is_the_probability_of_a_draft_given_the_previous_one(extension: str) -> None:
    drafter = copy.deepcopy(trained("p-eagle", 48, extension).drafter)
    drafter.config = replace(drafter.config, calibration=(2.0, 1.5, 0.5))
    generator = torch.Generator().manual_seed(0)
    normed = torch.randn(3, K, drafter.config.hidden_size, generator=generator)
    rows = normed.flatten(0, 1)
    ids, logp = Branching(drafter)(rows, drafter.logits(rows), K)
    chain = drafter.drafts(normed)
    confidence = draft_confidence(drafter, normed, ids, logp, chain)
    for b, k in itertools.product(range(3), range(K)):
        row = normed[b, k]
        factor = (2.0, 1.5, 0.5, 0.5)[k]
        plain = factor * drafter.logits(row[None])[0]
        if k:
            row = drafter.dependency(row[None], drafter.embed(chain[b, k - 1 : k]))[0]
        dependent = factor * drafter.logits(row[None])[0]
        is_candidate = torch.zeros_like(plain, dtype=torch.bool).index_fill(0, ids[b, k], True)
        total = torch.where(is_candidate, dependent, plain).logsumexp(0)
        draft = int((drafter.target_ids == chain[b, k]).nonzero())
        odds = torch.special.logit((dependent[draft] - total).exp())
        odds = odds + (drafter.confidence(row)[0] if drafter.confidence is not None else 0)
        assert confidence[b, k] == pytest.approx(float(odds.sigmoid()), abs=1e-4)


def test_a_plain_drafter_has_no_draft_confidence() -> None:
    run = trained("p-eagle")
    pair = LoadedPair(Pair("tiny", TargetSource(()), {}), run.target, {"p-eagle": run.drafter})
    engine = Engine(pair, EngineConfig(k=K, max_batch=1, kv_tokens=512, thread=False))
    engine.loop.drafts.policy = policy = RecordingPolicy(engine.max_shape)
    engine.add(prompts(1)[0], max_tokens=20)
    engine.drain()
    assert policy.recorded and not any(policy.recorded)
