"""The command `peagle train`: config, plan, dry run, interrupt and resume."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from peagle.cli import app
from peagle.drafter.formats import checkpoint
from peagle.train.config import read_config
from peagle.train.records import StepRecord
from peagle.train.run import TrainRun
from tests.support.models.chat_targets import make_chat_target, save_chat_target
from tests.support.train.training import write_answers

pytestmark = pytest.mark.usefixtures("no_curves")
SMALL = (
    "layers=1 k=4 eval_k=3 aux_layer_ids=1,3,6 mask_token_id=5 pack_tokens=256 held_out=4"
    " log_every=1 steps=6"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run")
    target = save_chat_target(path / "target")
    write_answers(target, path / "answers.jsonl", 30, 20)
    return path


def options(folder: Path, out: Path, *more: str) -> list[str]:
    words = [
        *SMALL.split(),
        f"target={folder / 'target'}",
        f"data={folder / 'answers.jsonl'}",
        f"out={out}",
        *more,
    ]
    return [part for word in words for part in ("--set", word)]


def train(*words: str) -> Result:
    return CliRunner().invoke(app, ["train", *words])


def test_print_config_is_a_config(tmp_path: Path) -> None:
    shown = train("--print-config", "--set", "lr=0.5").output
    (tmp_path / "c.yaml").write_text(shown)
    assert read_config(tmp_path / "c.yaml").lr == 0.5


def test_plan_does_not_train(folder: Path, tmp_path: Path) -> None:
    done = train(*options(folder, tmp_path / "out"), "--plan")
    assert done.exit_code == 0 and "GB of memory" in done.output and not (tmp_path / "out").exists()


def test_plan_shows_the_time_limit(folder: Path, tmp_path: Path) -> None:
    more = ("steps=1000000000", "minutes=2")
    assert "free; 2 minutes" in train(*options(folder, tmp_path / "out", *more), "--plan").output


def test_dry_run_writes_a_checkpoint(folder: Path, tmp_path: Path) -> None:
    done = train(*options(folder, tmp_path / "out"), "--dry-run")
    assert done.exit_code == 0, done.output
    target = make_chat_target()
    assert not checkpoint.load(tmp_path / "out" / "drafter", target, target.dtype).config.trained


def test_stopped_and_resumed(folder: Path, tmp_path: Path) -> None:
    words = options(folder, tmp_path / "out")
    assert "stopped after step 1" in train(*words, "--stop-after", "0.000001").output
    done = train(*words)
    assert done.exit_code == 0 and "resuming" in done.output and "published" in done.output
    steps = [
        json.loads(line)["step"]
        for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()
    ]
    assert steps == [1, 2, 3, 4, 5, 6, 6]  # the last line is the evaluation's


def test_an_interrupt_keeps_the_steps_done(folder: Path, tmp_path: Path) -> None:
    config = read_config(
        None, dict(word.split("=", 1) for word in options(folder, tmp_path / "out")[1::2])
    )
    before = signal.getsignal(signal.SIGINT)

    def interrupt(step: int, total: int, record: StepRecord) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    run = TrainRun(config)
    assert not run.train(interrupt, print)
    assert run.trainer.step == 3 and signal.getsignal(signal.SIGINT) is before
    again = TrainRun(config)
    assert again.train(lambda *_: None, print) and again.trainer.step == 6


def test_the_draft_vocabulary_of_the_drafter_in_init(folder: Path, tmp_path: Path) -> None:
    """Without `draft_vocab=-1`, other documents give another draft vocabulary."""
    lines = (folder / "answers.jsonl").read_text().splitlines()
    (tmp_path / "few.jsonl").write_text("\n".join(lines[:6]))
    few = f"data={tmp_path / 'few.jsonl'}"
    first = options(folder, tmp_path / "first", few, "draft_vocab=20", "held_out=0")
    assert train(*first).exit_code == 0
    init = tmp_path / "first" / "drafter"
    ids = checkpoint.read(init).tensors["target_ids"].tolist()
    for size, same in (("-1", True), ("20", False)):
        words = options(folder, tmp_path / "more", f"init={init}", f"draft_vocab={size}")
        run = TrainRun(read_config(None, dict(word.split("=", 1) for word in words[1::2])))
        assert run.data.target_ids is not None and run.trainer.drafter.target_ids is not None
        assert (run.data.target_ids.tolist() == ids) is same and 0 < run.data.coverage < 1
        assert torch.equal(run.trainer.drafter.target_ids.cpu(), run.data.target_ids)
    words = options(folder, tmp_path / "dry", f"init={init}", "draft_vocab=-1", "data=")
    assert train(*words, "--dry-run").exit_code == 0
    assert checkpoint.read(tmp_path / "dry" / "drafter").tensors["target_ids"].tolist() == ids


def test_resuming_with_other_documents_is_refused(folder: Path, tmp_path: Path) -> None:
    words = options(folder, tmp_path / "out")
    train(*words, "--stop-after", "0")
    lines = (folder / "answers.jsonl").read_text().splitlines()
    (tmp_path / "other.jsonl").write_text("\n".join(lines[1:]))
    done = train(*options(folder, tmp_path / "out", f"data={tmp_path / 'other.jsonl'}"))
    assert done.exit_code == 2 and "other documents" in done.output


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("lerning_rate=1", "unknown key"),
        ("k=0", "k is 0"),
        ("data=nowhere.jsonl", "no file"),
        ("optimizer", "key=value"),
        ("target=nowhere", "unknown pair"),
        ("init=nowhere", "nowhere"),
        ("layers=9", "8 layers"),
        ("beta1=1", "beta1"),
        ("epochs=inf", "epochs"),
    ],
)
def test_bad_input_is_reported_without_a_traceback(
    folder: Path, tmp_path: Path, word: str, message: str
) -> None:
    done = train(*options(folder, tmp_path / "out", word))
    assert done.exit_code == 2 and message in done.output and "Traceback" not in done.output
