"""GGUF files on the command line."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from peagle.catalog import find_pair
from peagle.cli import app
from tests.support.models.gguf_files import TinyGGUF


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)


def refusal(*words: str) -> str:
    result = CliRunner().invoke(app, [*words])
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


def test_a_file_is_not_a_prompt(tmp_path: Path) -> None:
    TinyGGUF(tmp_path / "my model.gguf").write()
    for name in ("my model.gguf", "mistyped.gguf"):
        assert f"{name} is a file, not a prompt" in refusal("generate", name)


def test_a_mistyped_path_is_not_taken_for_a_hub_id() -> None:
    for command in (["generate", "models/m.gguf", "hi"], ["pull", "models/m.gguf"]):
        assert "there is no file models/m.gguf" in refusal(*command)
    words = ("generate", "hi", "--target", "models/m.gguf")
    assert "there is no file models/m.gguf" in refusal(*words)
    add = refusal("catalog", "add", "mine", "--target", "models/m.gguf")
    assert "there is no file models/m.gguf" in add


def test_a_file_as_the_target_of_a_pair(tmp_path: Path) -> None:
    file = TinyGGUF(tmp_path / "m.gguf").write()
    added = CliRunner().invoke(app, ["catalog", "add", "mine", "--target", "m.gguf"])
    assert added.exit_code == 0, added.output
    pair = find_pair("mine")
    assert pair.target.folder == file.resolve() and pair.target.hub is None
    shown = CliRunner().invoke(app, ["catalog", "show", "mine", "--json"])
    assert shown.exit_code == 0 and json.loads(shown.output)["target"] == str(file.resolve())
    checked = CliRunner().invoke(app, ["catalog", "validate", "mine"])
    assert checked.exit_code == 0, checked.output
