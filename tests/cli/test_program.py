"""The exit of the program `peagle`."""

import subprocess
import sys
from pathlib import Path

import pytest

# Replaces the application by one that prints an answer and registers an atexit handler.
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
def test_only_generate_skips_the_exit_handlers(code: int, command: str, output: str) -> None:
    assert run(code, command) == (code, output)


def test_a_closed_output_is_no_error() -> None:
    """With a closed stdout, `sys.stdout` is None and output is discarded."""
    command = [sys.executable, "-c", SCRIPT, "0", "generate"]
    closing = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    done = subprocess.run(closing, stderr=subprocess.PIPE, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_an_error() -> None:
    with open("/dev/full", "w") as full:
        code, _ = run(0, "generate", stdout=full.fileno())
    assert code != 0
