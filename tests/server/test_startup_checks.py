"""`peagle serve` refuses folders that cannot be used in one line, before it starts a process."""

from pathlib import Path

import pytest

from peagle.server import run as server_run
from peagle.server.settings import ServerSettings
from peagle.server.startup_checks import check_folders
from tests.support.command_line import run


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The socket is opened before the first process is started."""

    def fail(settings: ServerSettings) -> None:
        raise AssertionError("the server starts")

    monkeypatch.setattr(server_run, "open_listener", fail)


def refusal(*args: object) -> str:
    """The line that `peagle serve` writes."""
    output = run("serve", *args, "--port", 0, code=2)
    assert output.startswith("error: ") and output.count("\n") == 1, output
    return output


def test_a_learn_folder_that_cannot_be_written(nothing_starts: None, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in ("/proc/nope", "/proc", tmp_path / "file", tmp_path / "file" / "learn"):
        line = refusal("smollm2-135m", "--learn", folder)
        assert f"cannot write to {folder}" in line and "another folder with --learn" in line


def test_a_learn_folder_is_created(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "learn"
    for _ in range(2):
        check_folders(ServerSettings(learn=str(folder)))
        assert folder.is_dir() and not list(folder.iterdir())
