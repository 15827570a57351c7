"""Calibration of drafts: fitted factors, reliability and its errors, and the published drafter."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from peagle.drafter.formats import checkpoint
from peagle.train.curves import draw_reliability
from peagle.train.data.documents import read_documents
from peagle.train.evaluation.acceptance import DraftReplay
from peagle.train.evaluation.calibration import (
    MIN_ROWS_PER_DEPTH,
    DepthRows,
    calibrate,
    calibration_error,
    corrected_logits,
    fit_factor,
    reliability_bins,
)
from peagle.train.features.features import FeatureExtractor
from peagle.train.objective.passes import DrafterPasses
from peagle.train.publish import publish
from peagle.train.run import TrainRun
from tests.support.models.tiny_models import AUX
from tests.support.train.training import EXTENSIONS, Trained, some_config, trained

pytestmark = pytest.mark.usefixtures("no_curves")


def replay_of(pair: Trained) -> DraftReplay:
    passes, features = DrafterPasses(pair.drafter), FeatureExtractor(pair.target, AUX)
    return DraftReplay(passes, features, 512)


def sampled(drafter, factor: float, depth: int, rows: int = 3000) -> DepthRows:
    """DepthRows whose tokens are drawn from the softmax of factor * corrected_logits."""
    torch.manual_seed(0)
    normed, before = 4 * torch.randn(rows, 32), torch.randint(6, 96, (rows,))
    drawn = DepthRows(normed, before, before)
    expected = torch.multinomial((factor * corrected_logits(drafter, drawn, depth)).softmax(-1), 1)[
        :, 0
    ]
    return drawn._replace(expected=expected)


@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("factor", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("extension", ["", "dependency"])
def test_the_factor_is_fitted(extension: str, factor: float, depth: int) -> None:
    drafter = trained("p-eagle", 48, extension).drafter
    assert fit_factor(drafter, sampled(drafter, factor, depth), depth) == pytest.approx(
        factor, rel=0.08
    )


def test_corrected_logits_equal_the_scores_of_a_tree() -> None:
    """Logits of candidates equal `score_pairs` for the previous token; other tokens, and depth 0,
    are not corrected.
    """
    drafter = trained("p-eagle", 48, "dependency").drafter
    torch.manual_seed(0)
    normed = torch.randn(5, 3, 32)
    ids, pairs = drafter.score_pairs(normed)
    rows = DepthRows(normed[:, 2], drafter.target_token_ids(ids[:, 1, 4]), ids[:, 1, 4])
    mine, plain = corrected_logits(drafter, rows, 2), drafter.logits(normed[:, 2])
    torch.testing.assert_close(mine.gather(1, ids[:, 2]), pairs[:, 2, 4], rtol=1e-4, atol=1e-4)
    rest = torch.ones_like(mine, dtype=torch.bool).scatter(1, ids[:, 2], False)
    assert torch.equal(mine[rest], plain[rest]) and not torch.allclose(mine, plain)
    assert torch.equal(corrected_logits(drafter, rows, 0), plain)


@pytest.mark.parametrize("extension", ["", "all"])
def test_calibration_on_answers(extension: str, tmp_path: Path) -> None:
    """A depth counts rows whose earlier drafts are all right; calibration does not add error."""
    pair = trained("p-eagle", 48, extension)
    documents = read_documents([pair.data], pair.target, 256)
    factors, reliability = calibrate(replay_of(pair), documents, 5, logit_rows=100)
    assert len(factors) == 5 and all(0.3 < factor < 3 for factor in factors)
    counts, right = (
        np.bincount(reliability.depth),
        np.bincount(reliability.depth, reliability.right),
    )
    assert (counts[1:] <= right[:-1]).all() and counts[0] > 500 and right[0] > 50
    assert (
        calibration_error(reliability.scaled, reliability.right)
        < calibration_error(reliability.plain, reliability.right) + 0.01
    )
    assert (
        np.mean((reliability.scaled - reliability.right) ** 2)
        <= np.mean((reliability.plain - reliability.right) ** 2) + 0.002
    )
    assert (reliability.confidence is not None) == (extension == "all")
    rows = reliability.card_rows()
    assert "calibrated" in rows["Brier score of the best draft"] and len(rows) == 2
    assert ("confidence output" in rows["expected calibration error"]) == (extension == "all")
    draw_reliability(reliability, tmp_path / "calibration.png")
    assert (tmp_path / "calibration.png").stat().st_size > 5000


def test_depths_with_few_rows_use_the_factor_of_the_depth_before() -> None:
    pair = trained("p-eagle", 48)
    documents = read_documents([pair.data], pair.target, 256).subset(np.arange(3))
    factors, reliability = calibrate(replay_of(pair), documents, 5)
    counts = np.bincount(reliability.depth, minlength=5)
    few = int((counts < MIN_ROWS_PER_DEPTH).argmax())
    assert 0 < few < 5 and len(set(factors[few - 1 :])) == 1


def test_reliability_bins_and_calibration_error() -> None:
    predicted, right = np.array([0.95, 0.95, 0.45, 0.45]), np.array([1.0, 0.0, 1.0, 0.0])
    assert reliability_bins(predicted, right) == [
        (pytest.approx(0.45), 0.5, 2),
        (pytest.approx(0.95), 0.5, 2),
    ]
    assert calibration_error(predicted, right) == pytest.approx(0.25)
    assert reliability_bins(np.array([1.0, 0.0]), np.array([1.0, 0.0])) == [
        (0.0, 0.0, 1),
        (1.0, 1.0, 1),
    ]


@pytest.mark.parametrize(
    ("cost", "bits"), [(1.0, 8), (1.0, 4), (-1.0, 4)], ids=["int8", "int4", "bfloat16"]
)
def test_a_published_drafter_is_calibrated(
    cost: float, bits: int, tmp_path: Path, monkeypatch
) -> None:
    pair = trained("p-eagle")
    monkeypatch.setattr("peagle.train.run.load_teacher", lambda config, device: pair.target)
    config = some_config(
        pair.data, tmp_path / "run", steps=3, device="cpu", bits=bits, **EXTENSIONS["all"]
    )
    run = TrainRun(config)
    run.train(lambda *_: None, lambda line: None)
    calibrated = list[DraftReplay]()

    def spy(replay: DraftReplay, *arguments: Any) -> Any:
        calibrated.append(replay)
        return calibrate(replay, *arguments)

    monkeypatch.setattr("peagle.train.publish.calibrate", spy)
    folder, length = publish(run, ["peagle train"], max_rounding_loss=cost)
    drafter = checkpoint.load(folder, pair.target, torch.float32)
    assert len(drafter.config.calibration) == 5 and length is not None
    parameters = [d.parameters() for d in (calibrated[0].passes.drafter, drafter)]
    assert all(torch.equal(*pair) for pair in zip(*parameters, strict=True)), (
        "another drafter than the stored one was calibrated"
    )
    source = checkpoint.load(tmp_path / "run" / "drafter", pair.target, torch.float32)
    assert (
        replace(drafter.config, calibration=()) == source.config and source.config.calibration == ()
    )
    if cost < 0:
        assert all(
            torch.equal(a, b)
            for a, b in zip(drafter.parameters(), source.parameters(), strict=True)
        )
    card = (folder / "README.md").read_text()
    assert ("bfloat16 (held-out" if cost < 0 else f"int{bits} rows (held-out") in card
    assert ("int4" in card) == (bits == 4)
    assert (
        "Brier score" in card
        and "(calibration.png)" in card
        and (folder / "calibration.png").is_file()
    )
