"""The outlook: what a drafter says its drafts are worth reaches whoever chooses the form, and is about right."""

from collections.abc import Sequence

import pytest

from peagle.core import Pair, TargetSource
from peagle.engine import Engine
from peagle.engine.adaptive import Choice, Fixed
from peagle.loaded import LoadedPair
from peagle.tree import Tree
from tests.test_acceptance import prompts
from tests.training import trained

K = 4


class Listening(Fixed):
    """Remembers what it was told."""

    def __init__(self, tree: Tree) -> None:
        super().__init__(tree)
        self.told: list[Sequence[float] | None] = []

    def choose(self, batch: int, outlook: Sequence[float] | None = None) -> Choice:
        self.told.append(outlook)
        return super().choose(batch, outlook)


@pytest.mark.parametrize(("rung", "nodes"), [("dependency", K), ("all", K), ("dependency", 12)])
def test_what_is_foretold_comes_about(rung: str, nodes: int) -> None:
    one = trained("p-eagle", 48, rung)
    pair = LoadedPair(Pair("tiny", TargetSource(()), {}), one.target, {"p-eagle": one.drafter})
    engine = Engine(pair, k=K, tree=nodes if nodes > K else 0, max_batch=1, tokens=512, thread=False)
    engine.rounds.chooser = policy = Listening(engine.largest)
    for prompt in prompts(8) * 2:
        engine.add(prompt, max_tokens=40, ignore_eos=True)
        engine.drain()
    known = [told for told in policy.told if told is not None]
    assert len(known) > 0.7 * engine.metrics.steps and all(len(told) == K for told in known)
    assert all(0 < share < 1 for told in known for share in told)
    if nodes == K:  # of a chain: given that those before were accepted, so is each
        first = sum(told[0] for told in known) / len(known)
        assert first == pytest.approx(engine.metrics.accepted_at[0] / engine.metrics.drafts, abs=0.25)


def test_a_plain_drafter_has_none() -> None:
    one = trained("p-eagle")
    pair = LoadedPair(Pair("tiny", TargetSource(()), {}), one.target, {"p-eagle": one.drafter})
    engine = Engine(pair, k=K, max_batch=1, tokens=512, thread=False)
    engine.rounds.chooser = policy = Listening(engine.largest)
    engine.add(prompts(1)[0], max_tokens=20)
    engine.drain()
    assert policy.told and not any(policy.told)
