"""`peagle serve` refuses unknown names and bad folders in one line, before it starts a process."""

from pathlib import Path

import pytest

from peagle.server import run as server_run
from peagle.server.settings import ServerSettings
from peagle.server.startup_checks import check_sources
from tests.support.command_line import run


@pytest.fixture
def no_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The socket is opened before the first process is started."""

    def fail(settings: ServerSettings) -> None:
        raise AssertionError("the server starts")

    monkeypatch.setattr(server_run, "open_listener", fail)


def refusal(*args: object) -> str:
    """The error line of `peagle serve`."""
    output = run("serve", *args, "--port", 0, code=2)
    assert output.startswith("error: ") and output.count("\n") == 1, output
    return output


BAD: dict[str, tuple[tuple[str, ...], str]] = {
    "pair": (("nope",), "unknown pair 'nope': use one of"),
    "folder": (("{root}/nope",), "there is no folder {root}/nope"),
    "file": (("{root}/nope.gguf",), "there is no file {root}/nope.gguf"),
    "home": (("~nobody-here/target",), "there is no folder ~nobody-here/target"),
    "pair for vLLM": (("nope", "--engine", "vllm"), "unknown pair 'nope'"),
    "target": (("smollm2-135m", "--target", "nope"), "unknown pair 'nope'"),
    "drafter": (("smollm2-135m", "--drafter", "/nope"), "no drafter in /nope: there is no such"),
    "second drafter": (("smollm2-135m", "--drafter", "{root}, /nope"), "no drafter in /nope"),
    "drafter's file": (("smollm2-135m", "--drafter", "{root}/file"), "it is a file"),
    "drafter for vLLM": (
        ("smollm2-135m", "--engine", "vllm", "--drafter", "/nope"),
        "no drafter in /nope",
    ),
    "replay": (
        ("smollm2-135m", "--learn", "{root}/learn", "--learn-replay", "{root}/nope"),
        "there is no {root}/nope: give --learn-replay",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_unknown_names_and_folders(case: str, no_process_starts: None, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    words, expected = BAD[case]
    line = refusal(*(word.format(root=tmp_path) for word in words))
    assert expected.format(root=tmp_path) in line
    assert not (tmp_path / "learn").exists()


def test_a_learn_folder_that_cannot_be_written(no_process_starts: None, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in ("/proc/nope", "/proc", tmp_path / "file", tmp_path / "file" / "learn"):
        line = refusal("smollm2-135m", "--learn", folder)
        assert f"cannot write to {folder}" in line and "another folder with --learn" in line


def test_a_learn_folder_is_created(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "learn"
    for _ in range(2):
        check_sources(ServerSettings(learn=str(folder)))
        assert folder.is_dir() and not list(folder.iterdir())
