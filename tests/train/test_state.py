"""Files of a training run: states that survive a full disk, the log, curves and events."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from peagle.errors import UserError
from peagle.train.config import TrainConfig
from peagle.train.journal import Journal
from peagle.train.records import EvaluationRecord, StepRecord
from peagle.train.state import RunState, check_same_run, list_states
from tests.support.train.training import config_in, start, train


def test_the_newest_two_states_are_kept(tmp_path):
    trainer = start(config_in(tmp_path, save_every=2))
    train(trainer)
    folder = trainer.out / "state"
    assert sorted(path.name for path in folder.iterdir()) == [
        "step-00000006.pt",
        "step-00000008.pt",
    ]


def test_a_state_from_before_eval_k_had_a_default_of_0_resumes():
    stored = asdict(TrainConfig(k=4, eval_k=7))
    check_same_run(RunState(3, stored, "digest", 1.0, 9), TrainConfig(k=4), "digest", Path("out"))


@pytest.mark.parametrize("torn", [b"", b"no state at all", None])
def test_an_unreadable_state(torn: bytes | None, tmp_path):
    trainer = start(config_in(tmp_path, save_every=2))
    train(trainer)
    newest = list_states(trainer.out / "state")[-1]
    newest.write_bytes(newest.read_bytes()[:-1000] if torn is None else torn)
    again = start(config_in(tmp_path, save_every=2))
    with pytest.raises(UserError, match=rf"cannot read .*{newest.name}.*Remove it"):
        again.resume()
    newest.unlink()
    assert again.resume() and again.step == 6


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), RuntimeError("failed writing file")]
)
def test_a_full_disk_leaves_the_old_state(error: Exception, tmp_path, monkeypatch):
    trainer = start(config_in(tmp_path, steps=6))
    plain = torch.save

    def full(state: dict, path: Path) -> None:
        if state["step"] == 3:
            return plain(state, path)
        path.write_bytes(b"the beginning")
        raise error

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(UserError, match=r"cannot write .*step-00000006.*step-00000003"):
        train(trainer)
    assert [path.name for path in (trainer.out / "state").iterdir()] == ["step-00000003.pt"], (
        "a partly written state is left"
    )
    again = start(config_in(tmp_path, steps=6))
    assert again.resume() and again.step == 3


def test_the_journal_drops_records_after_the_resumed_step(tmp_path):
    lines = [
        asdict(StepRecord(1, 3.0)),
        asdict(StepRecord(2, 2.0)),
        asdict(EvaluationRecord(2, 2, 1.5)),
    ]
    text = "".join(json.dumps(line) + "\n" for line in [*lines, {"step": 3, "loss": 1.0}])
    (tmp_path / "log.jsonl").write_text(text + '{"step": 4, "lo')
    assert [asdict(record) for record in Journal(tmp_path, step=2).records] == lines
    assert [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()] == lines
    assert (
        Journal(tmp_path / "other", active=False).records == []
        and not (tmp_path / "other").exists()
    )


def test_log_curves_and_events(tmp_path):
    seen: list[tuple[int, int]] = []
    trainer = start(config_in(tmp_path, eval_every=4, log_every=2))
    journal = Journal(trainer.out)
    assert trainer.train(journal, lambda done, total, record: seen.append((done, total)))
    lines = [json.loads(line) for line in (trainer.out / "log.jsonl").read_text().splitlines()]
    logs, evaluations = (
        [line for line in lines if key in line] for key in ("loss", "acceptance_length")
    )
    assert seen == [(step, 8) for step in (2, 3, 4, 6, 8)] == [(line["step"], 8) for line in logs]
    assert [line["step"] for line in evaluations] == [4, 8]
    assert all(len(line["match"]) == len(line["loss_per_depth"]) == 3 for line in logs)
    assert logs[-1]["tokens"] == trainer.tokens > 0 and logs[-1]["lr"] < logs[1]["lr"]
    assert (trainer.out / "curves.png").read_bytes().startswith(b"\x89PNG")
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(trainer.out / "events"))
    events.Reload()
    assert [e.step for e in events.Scalars("loss")] == [2, 3, 4, 6, 8]
    assert [e.step for e in events.Scalars("acceptance_length")] == [4, 8]
