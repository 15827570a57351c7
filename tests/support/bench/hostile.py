"""Programs for the sandbox, and targets of their attacks."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from peagle.bench.quality.programs import Submission
from peagle.bench.quality.sandbox import find_sandbox, passes
from peagle.bench.quality.sandbox.sandbox import (
    BUBBLEWRAP_BARRIERS,
    NOBODY_ID,
    OWN_BARRIERS,
    Sandbox,
)

WITHOUT_NAMESPACES = ("landlock", "seccomp")
ORDINARY_USER = 12_345


def program(code: str) -> Submission:
    """A program that passes if `code` runs to its end."""
    return Submission(
        f"{code}\n\ndef ran():\n    return 'yes'\n",
        "",
        "def check(candidate):\n    assert candidate() == 'yes'\n",
        "ran",
    )


def runs(code: str, sandbox: Sandbox | None = None, seconds: float = 60.0) -> bool:
    return passes(program(code), seconds, sandbox)


def own_sandbox(*barriers: str) -> Sandbox:
    """The sandbox of this package, even if bubblewrap is installed."""
    return replace(find_sandbox(), bubblewrap=None, barriers=barriers)


def sandboxes() -> dict[str, Sandbox]:
    """All kinds of sandboxes that this machine supports."""
    ways = {
        "own": own_sandbox(*OWN_BARRIERS),
        "own without namespaces": own_sandbox(*WITHOUT_NAMESPACES),
    }
    if bubblewrap := shutil.which("bwrap"):
        by_tool = replace(find_sandbox(), bubblewrap=bubblewrap, barriers=BUBBLEWRAP_BARRIERS)
        ways["bubblewrap"] = by_tool
        ways["bubblewrap without Landlock"] = replace(by_tool, barriers=("seccomp",))
    return ways


@contextmanager
def outside_folder() -> Iterator[Path]:
    """A folder outside of the sandbox whose mode allows writing."""
    folder = Path(tempfile.mkdtemp(prefix="peagle-outside-"))
    (folder / "victim.txt").write_text("untouched" * 10)
    try:
        folder.chmod(0o777)
        if os.geteuid() == 0:
            os.chown(folder / "victim.txt", NOBODY_ID, NOBODY_ID)
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def victim_process() -> Iterator[subprocess.Popen[bytes]]:
    """A process of the user of the sandbox, which the kernel would let it signal."""
    nobody = NOBODY_ID if os.geteuid() == 0 else None
    interpreter = find_sandbox().interpreter
    victim = subprocess.Popen(
        [interpreter, "-I", "-S", "-c", "import time\nprint(1, flush=True)\ntime.sleep(600)"],
        stdout=subprocess.PIPE,
        env=dict(find_sandbox().environment),
        cwd="/",
        user=nobody,
        group=nobody,
        extra_groups=() if nobody else None,
        start_new_session=True,
    )
    assert victim.stdout is not None
    victim.stdout.readline()
    try:
        yield victim
    finally:
        victim.kill()
        victim.wait()
        victim.stdout.close()


def is_alive(victim: "subprocess.Popen[bytes]", seconds: float = 0.3) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if victim.poll() is not None:
            return False
        time.sleep(0.02)
    return True


def as_ordinary_user(code: str, path: str) -> "subprocess.CompletedProcess[str]":
    """Run `code`, which may import the sandbox, as a user without files. Needs root."""
    sandbox = find_sandbox()
    return subprocess.run(
        [sandbox.interpreter, "-S", "-B", "-c", code],
        capture_output=True,
        text=True,
        cwd="/",
        env={**dict(sandbox.environment), "PYTHONPATH": package_parent(), "PATH": path},
        user=ORDINARY_USER,
        group=ORDINARY_USER,
        extra_groups=(),
        timeout=120,
    )


def package_parent() -> str:
    return str(Path(sys.modules["peagle"].__path__[0]).parent)
