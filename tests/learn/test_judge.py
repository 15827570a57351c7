"""The judge: only a clearly better candidate wins, not an equal, worse or uncertain one."""

from pathlib import Path

import numpy as np
import pytest

from peagle.learn.training.judge import AcceptedCounts, compare, count_accepted, judge
from peagle.learn.training.round_folder import write_records
from peagle.learn.training.round_settings import RoundSettings
from peagle.train.data.documents import read_documents
from peagle.train.evaluation.acceptance import DraftReplay
from peagle.train.evaluation.replay import acceptance_length
from peagle.train.features.features import FeatureExtractor
from peagle.train.objective.passes import DrafterPasses
from tests.support.server.serving import tiny_pair
from tests.support.train.learning import answers

SETTINGS = RoundSettings()


def counts(length: float, documents: int = 40, noise: float = 0.3, seed: int = 0) -> AcceptedCounts:
    rng = np.random.default_rng(seed)
    steps = rng.integers(20, 60, documents).astype(float)
    accepted = steps * np.maximum(length - 1 + noise * rng.standard_normal(documents), 0)
    return AcceptedCounts(accepted, steps)


@pytest.mark.parametrize(
    ("factor", "wins"), [(1.3, True), (1.05, True), (1.005, False), (1.0, False), (0.9, False)]
)
def test_only_a_better_candidate_wins(factor: float, wins: bool) -> None:
    before = counts(2.5)
    after = AcceptedCounts(before.accepted * factor + (factor - 1) * before.steps, before.steps)
    comparison = compare(before, after, 7)
    assert comparison.ratio == pytest.approx(factor, abs=1e-3)
    assert judge(comparison, None, SETTINGS).wins == wins


def test_an_uncertain_gain_does_not_win() -> None:
    comparison = compare(counts(2.5, 20, 1.0, seed=1), counts(2.6, 20, 1.0, seed=2), 7)
    verdict = judge(comparison, None, SETTINGS)
    assert comparison.low < 1 < comparison.high
    assert not verdict.wins and "does not exceed 1.01" in verdict.reason


def test_few_documents_never_win() -> None:
    verdict = judge(compare(counts(2.0, 8), counts(4.0, 8), 7), None, SETTINGS)
    assert not verdict.wins and "only 8 held-back answers, 20 are needed" in verdict.reason


def test_forgetting_rejects_a_candidate() -> None:
    better = compare(counts(2.0), counts(3.0), 7)
    worse = compare(counts(4.0), counts(3.7), 7)
    verdict = judge(better, worse, SETTINGS)
    assert not verdict.wins and "below 0.98 x" in verdict.reason
    assert judge(better, compare(counts(4.0), counts(4.0), 7), SETTINGS).wins


def test_the_interval_is_deterministic() -> None:
    assert compare(counts(2.0), counts(2.2, seed=3), 7) == compare(
        counts(2.0), counts(2.2, seed=3), 7
    )


def test_counts_by_document_add_up_to_the_replay(tmp_path: Path) -> None:
    """The sums over documents give the acceptance length that training logs."""
    pair = tiny_pair()
    drafter = pair.drafter("p-eagle")
    write_records(tmp_path / "answers.jsonl", answers()[:12])
    documents = read_documents([tmp_path / "answers.jsonl"], pair.target, 64)
    features = FeatureExtractor(pair.target, drafter.config.aux_layer_ids or ())
    replay = DraftReplay(DrafterPasses(drafter), features, 128)
    pauses: list[int] = []
    counted = count_accepted(replay, documents, 4, lambda: pauses.append(1))
    steps = replay.chain_steps(documents, [4])[4]
    assert counted.length == pytest.approx(acceptance_length(steps))
    assert counted.steps.sum() == len(steps) and (counted.steps > 0).all()
    assert len(pauses) == len(list(replay.packs(documents))) > 1
