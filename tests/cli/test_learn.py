"""`peagle learn` on a tiny pair: from a log to a drafter, status, rollback, export, purge."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from peagle.cli import app
from peagle.drafter.formats import checkpoint
from peagle.learn.document import StoredDocument
from peagle.learn.events import read_events
from peagle.learn.folder import LearnFolder
from peagle.learn.versions import version_folder
from tests.support.command_line import run
from tests.support.train.learning import QUICK, answers, tiny_root


def log_line(document: StoredDocument) -> str:
    """An exchange with token ids, as vLLM logs it."""
    choice = {"text": "", "token_ids": document.answer, "finish_reason": "length"}
    response = {"choices": [choice]}
    return json.dumps({"request": {"prompt": document.prompt}, "response": response}) + "\n"


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that has learned from a log."""
    root = tmp_path_factory.mktemp("log")
    log = root / "log.jsonl"
    log.write_text("".join(map(log_line, answers())) + "no JSON\n")
    folder = root / "learned"
    folder.mkdir()
    (folder / "training.json").write_text(json.dumps(QUICK))
    result = CliRunner().invoke(app, from_log(log, folder))
    assert result.exit_code == 0, result.output + repr(result.exception)
    assert "log.jsonl:61: skipped" in result.stderr
    assert "60 new answers, 0 known ones, 1 lines skipped" in result.stderr
    assert str(folder / "versions" / "0001") in result.stdout.replace("\n", "")
    return folder


def from_log(log: Path, folder: Path) -> list[str]:
    pair = [str(tiny_root() / "target"), "--drafter", str(tiny_root() / "p-eagle")]
    return ["learn", "from-log", str(log), "--out", str(folder), "--device", "cpu", "--pair", *pair]


def test_a_log_is_learned_once(learned: Path) -> None:
    error = run(*from_log(learned.parent / "log.jsonl", learned), code=2)
    assert "has learned from all its documents already" in error


def test_a_short_log_is_an_error(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(log_line(answers()[0]))
    error = run(*from_log(log, tmp_path / "learned"), code=2)
    assert "0 answers are held back" in error or "1 answers are held back" in error


def test_status_shows_versions(learned: Path, tmp_path: Path) -> None:
    text = run("learn", "status", learned, "--figure", tmp_path / "versions.png")
    assert "1 *" in text and "promoted" in text and "waiting" in text
    assert (tmp_path / "versions.png").read_bytes()[:4] == b"\x89PNG"
    values = json.loads(run("learn", "status", learned, "--json"))
    assert values["current"]["number"] == 1 and len(values["versions"]) == 1


def test_export_writes_a_drafter(learned: Path, tmp_path: Path) -> None:
    run("learn", "export", learned, "--out", tmp_path / "drafter")
    names = sorted(path.name for path in (tmp_path / "drafter").iterdir())
    assert names == ["config.json", "model.safetensors"]
    exported = checkpoint.read(tmp_path / "drafter")
    assert exported.config == checkpoint.read(version_folder(LearnFolder(learned), 1)).config
    text = run(
        *("generate", tiny_root() / "target", "w6 w9", "--drafter", tmp_path / "drafter"),
        *("--dtype", "float32", "--max-tokens", 8, "--json"),
    )
    assert json.loads(text)["method"] == "p-eagle"
    error = run("learn", "export", learned, "--out", tmp_path / "x", "--version", 0, code=2)
    assert "nothing to export" in error


def test_rollback_and_purge(learned: Path) -> None:
    folder = LearnFolder(learned)
    assert "current version is 0" in run("learn", "rollback", learned)
    assert "current one already" in run("learn", "rollback", learned, code=2)
    assert "current version is 1" in run("learn", "rollback", learned, "--version", 1)
    assert "1 segments" in run("learn", "purge", learned)
    assert not list(folder.documents.iterdir())
    kinds = [event.kind for event in read_events(folder.events)]
    assert kinds[-3:] == ["rolled back", "rolled back", "purged"]
    run("learn", "purge", learned, "--versions")
    assert json.loads(run("learn", "status", learned, "--json"))["versions"] == []


def test_a_folder_without_learning_is_refused(tmp_path: Path) -> None:
    assert "is not a folder of" in run("learn", "status", tmp_path, code=2)
