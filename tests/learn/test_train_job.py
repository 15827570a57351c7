"""The training job: documents become a promoted version; failures change nothing."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from peagle.drafter.formats import checkpoint
from peagle.errors import UserError
from peagle.learn import train_job
from peagle.learn.document import is_held_back, new_document
from peagle.learn.events import read_events
from peagle.learn.folder import LearnFolder
from peagle.learn.status import read_status
from peagle.learn.train_job import TrainJob
from peagle.learn.training.round_folder import RoundFolder
from peagle.learn.training.training_round import MAX_REPLAYS, TrainingRound
from peagle.learn.versions import list_versions, read_current, rollback, version_folder
from tests.support.train.learning import (
    answers,
    learner_settings,
    make_folder,
    random_answers,
    tiny_root,
    tiny_teacher,
    write_documents,
)


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load the tiny pair once for all tests."""
    monkeypatch.setattr(train_job, "load_teacher", lambda settings: tiny_teacher())


def folder_with_answers(root: Path, **settings: Any) -> LearnFolder:
    folder = make_folder(root, tiny_teacher(), **settings)
    write_documents(folder, answers(), time=1000.0)
    return folder


def make_job(folder: LearnFolder, **changes: Any) -> TrainJob:
    return TrainJob(folder, learner_settings(tiny_root(), **changes))


def kinds(folder: LearnFolder) -> list[str]:
    return [event.kind for event in read_events(folder.events)]


def test_documents_become_a_promoted_version(tmp_path: Path) -> None:
    folder = folder_with_answers(tmp_path)
    (record,) = make_job(folder).run()
    held_back = sum(is_held_back(document.id) for document in answers())
    assert record.held_back is not None
    assert record.held_back.documents == held_back and record.held_back.low > 1.01
    assert record.documents == len(answers()) - held_back
    assert read_current(folder).number == record.number == 1
    assert list_versions(folder)[0].state == "promoted"
    assert kinds(folder) == ["trained", "judged", "promoted"]
    assert RoundFolder(folder).plan() is None and RoundFolder(folder).read_cursor() > 1000
    check_config(folder)
    assert make_job(folder).run() == []  # There are no new documents.
    rollback(folder)
    assert read_current(folder).number == 0


def check_config(folder: LearnFolder) -> None:
    """A version differs from the pair's drafter in its weights alone."""
    before = checkpoint.read(tiny_teacher().drafter)
    after = checkpoint.read(version_folder(folder, 1))
    assert after.config == before.config and not after.problems()
    assert not torch.equal(after.tensors["fc.weight"], before.tensors["fc.weight"])


def test_a_version_trained_on_random_answers_is_rejected(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, tiny_teacher(), epochs=1.0, mixes=[0.5])
    write_documents(folder, random_answers(60), time=1000.0)
    (record,) = make_job(folder).run()
    assert record.state == "rejected" and "does not exceed" in record.reason
    assert read_current(folder).number == 0 and kinds(folder) == ["trained", "rejected"]


def test_a_stopped_round_resumes_with_the_same_documents(tmp_path: Path) -> None:
    folder = folder_with_answers(tmp_path, epochs=2.0)
    job = make_job(folder)
    job.on_step = lambda step, total, loss: job.stop() if step == 1 else None
    assert job.run() == []
    plan = RoundFolder(folder).plan()
    assert plan is not None and list((tmp_path / "round" / "state").glob("step-00000002.pt"))
    write_documents(folder, random_answers(30), time=2000.0)
    steps: list[int] = []
    resumed = make_job(folder)
    resumed.on_step = lambda step, total, loss: steps.append(step)
    record = resumed.run_round(plan)
    assert record is not None and record.documents == plan.documents
    assert steps[0] == 3 and steps[-1] == record.steps


def test_a_training_state_of_other_settings_is_discarded(tmp_path: Path) -> None:
    """Settings change after an upgrade, a move of the drafter or an edit of training.json."""
    folder = folder_with_answers(tmp_path, epochs=2.0)
    job = make_job(folder)
    job.on_step = lambda step, total, loss: job.stop()
    assert job.run() == [] and list((tmp_path / "round" / "state").iterdir())
    resumed = make_job(folder)
    resumed.round_settings = replace(resumed.round_settings, lr=2e-3)
    steps: list[int] = []
    resumed.on_step = lambda step, total, loss: steps.append(step)
    assert len(resumed.run()) == 1 and steps[0] == 1
    assert kinds(folder)[0] == "failed"


def test_a_loss_that_is_not_finite_fails_only_the_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_with_answers(tmp_path)
    job = make_job(folder)
    plan = job.next_plan()
    assert plan is not None
    monkeypatch.setattr(
        "peagle.train.trainer.pack_gradients",
        lambda passes, batch, features, loss, scale, flex: nan_sums(loss.k),
    )
    assert job.run() == []
    status = read_status(folder)
    assert status.state == "failed" and "is nan: stopped" in str(status.error)
    assert kinds(folder) == ["failed"] and list_versions(folder) == []
    assert RoundFolder(folder).plan() is None  # The same documents are not tried again.
    assert RoundFolder(folder).read_cursor() == plan.cursor


def nan_sums(k: int) -> Any:
    from peagle.train.objective.loss import LossSums

    sums = LossSums.zeros(k, "cpu")
    sums.loss += np.nan
    return sums


def test_a_full_disk_keeps_the_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_with_answers(tmp_path, epochs=1.0)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    settings = learner_settings(tiny_root()).to_json()
    monkeypatch.setattr("peagle.learn.training.training_round.save_candidate", fail)
    assert train_job.main([str(tmp_path), settings]) == train_job.FAILED_EXIT_CODE
    assert "No space left" in str(read_status(folder).error)
    assert RoundFolder(folder).plan() is not None and read_current(folder).number == 0
    monkeypatch.undo()
    monkeypatch.setattr(train_job, "load_teacher", lambda settings: tiny_teacher())
    assert train_job.main([str(tmp_path), settings]) == 0
    assert len(list_versions(folder)) == 1


def test_a_purge_during_training_discards_the_candidate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No version may be trained on deleted documents."""
    folder = folder_with_answers(tmp_path, epochs=1.0)
    best_candidate = TrainingRound._best_candidate

    def purge_meanwhile(training: TrainingRound) -> Any:
        RoundFolder(folder).discard()
        return best_candidate(training)

    monkeypatch.setattr(TrainingRound, "_best_candidate", purge_meanwhile)
    settings = learner_settings(tiny_root()).to_json()
    assert train_job.main([str(tmp_path), settings]) == train_job.FAILED_EXIT_CODE
    assert "were purged" in str(read_status(folder).error)
    assert list_versions(folder) == [] and not list(folder.versions.iterdir())


def test_long_prompts_are_cut_at_the_front(tmp_path: Path) -> None:
    """Otherwise the answers would lie after the last token that the trainer reads."""
    folder = make_folder(tmp_path, tiny_teacher(), epochs=1.0, pack_tokens=128)
    long = [new_document(150 * [7] + d.prompt, d.answer) for d in answers()]
    write_documents(folder, long, time=1000.0)
    (record,) = make_job(folder).run()
    held_back = sum(is_held_back(document.id) for document in long)
    assert record.held_back is not None and record.held_back.documents == held_back
    assert record.documents == len(long) - held_back and record.steps > 0


def test_an_unexpected_error_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise KeyError("missing")

    folder = folder_with_answers(tmp_path, epochs=1.0)
    monkeypatch.setattr(TrainingRound, "run", fail)
    settings = learner_settings(tiny_root()).to_json()
    assert train_job.main([str(tmp_path), settings]) == train_job.FAILED_EXIT_CODE
    status = read_status(folder)
    assert status.state == "failed" and "missing" in str(status.error)


def test_a_store_of_another_target_is_refused(tmp_path: Path) -> None:
    folder = folder_with_answers(tmp_path)
    identity = json.loads(folder.identity.read_text()) | {"digest": "other"}
    folder.identity.write_text(json.dumps(identity))
    with pytest.raises(UserError, match="use another folder"):
        make_job(folder)
    assert list_versions(folder) == []


def test_replayed_answers_guard_against_forgetting(tmp_path: Path) -> None:
    from peagle.learn.training.round_folder import write_records

    folder = folder_with_answers(tmp_path / "learn", epochs=1.0, replay_share=0.5)
    replay = tmp_path / "replay"
    replay.mkdir()
    write_records(replay / "answers.jsonl", random_answers(60))
    job = make_job(folder, replay=str(replay))
    plan = job.next_plan()
    assert plan is not None
    record = job.run_round(plan)
    assert record is not None and record.replay is not None
    assert record.replay.documents == 12  # a fifth of the replay set
    assert job.training is not None
    training = job.training.data.training
    replayed = training.subset(np.arange(plan.documents, len(training)))
    assert 0.4 < len(replayed.ids) / len(training.ids) <= 0.5
    # The replay set has fewer tokens than its share of the round, so answers are repeated.
    assert 1 < max(Counter(replayed.keys).values()) <= MAX_REPLAYS
