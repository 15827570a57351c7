"""How the program `peagle` ends."""

import subprocess
import sys
from pathlib import Path

import pytest

# The application is replaced: prints, and leaves something to be done when Python ends.
SCRIPT = """
import atexit, sys
from peagle.cli import program
sys.argv = ["peagle", *sys.argv[2:], "code", sys.argv[1]]
def app():
    atexit.register(print, "at the end")
    print("answer", end="")
    sys.exit(int(sys.argv[-1]))
program.app = app
program.main()
"""


def run(code: int, *arguments: str, stdout: int = subprocess.PIPE) -> tuple[int, str]:
    command = [sys.executable, "-c", SCRIPT, str(code), *arguments]
    done = subprocess.run(
        command, stdout=stdout, stderr=subprocess.DEVNULL, text=True, check=False, timeout=120
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("code", "command", "output"),
    [
        (0, "generate", "answer"),
        (2, "generate", "answerat the end\n"),
        (0, "bench", "answerat the end\n"),
    ],
)
def test_only_generate_ends_at_once(code: int, command: str, output: str) -> None:
    assert run(code, command) == (code, output)


def test_a_closed_output_is_no_error() -> None:
    """Python then has no `sys.stdout`, and drops what is printed."""
    command = [sys.executable, "-c", SCRIPT, "0", "generate"]
    closing = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    done = subprocess.run(closing, stderr=subprocess.PIPE, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_an_error() -> None:
    with open("/dev/full", "w") as full:
        code, _ = run(0, "generate", stdout=full.fileno())
    assert code != 0
