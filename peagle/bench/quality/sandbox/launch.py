"""Chooses the sandbox of this machine, once: bubblewrap, else Landlock and seccomp, else an error.

Each candidate is tried with a small program before it is trusted.
"""

import compileall
import functools
import os
import platform
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from peagle.bench.quality.programs import Submission
from peagle.bench.quality.sandbox.child.syscalls import AUDIT_ARCH
from peagle.bench.quality.sandbox.interpreter import (
    interpreter_for_nobody,
    open_to_all,
    running_interpreter,
)
from peagle.bench.quality.sandbox.run import run_submission
from peagle.bench.quality.sandbox.sandbox import BUBBLEWRAP_BARRIERS, Sandbox, SandboxError

CHILD = Path(__file__).with_name("child")
CHILD_PACKAGE = "peagle.bench.quality.sandbox.child"
FIX = (
    "use Linux 5.13 or later with Landlock enabled (x86_64 or aarch64), install bubblewrap, or"
    " score in a virtual machine or container that has one of them"
)
PROBE = Submission(
    "import decimal, json\n\ndef answer(x):\n    open('probe', 'w').close()\n    return x + 1",
    "",
    "def check(candidate):\n    assert candidate(41) == 42",
    "answer",
)
PROBE_SECONDS = 60.0


@functools.cache
def find_sandbox() -> Sandbox:
    """Raises SandboxError where no program can be run safely. Remembered once it is found."""
    machine = platform.machine()
    if sys.platform != "linux" or machine not in AUDIT_ARCH:
        raise SandboxError(f"programs cannot be scored on {sys.platform} {machine}: {FIX}")
    reasons: list[str] = []
    for sandbox in possible_sandboxes():
        try:
            verdict = run_submission(sandbox, PROBE, PROBE_SECONDS)
        except SandboxError as error:
            verdict = f"refused {error}"
        if verdict.startswith("pass"):
            return sandbox
        name = "bubblewrap" if sandbox.bubblewrap else "Landlock and seccomp"
        reasons.append(f"{name}: {verdict.removeprefix('refused ')}")
    raise SandboxError(f"programs cannot be scored safely here ({'; '.join(reasons)}): {FIX}")


def possible_sandboxes() -> list[Sandbox]:
    own = own_sandbox()
    bubblewrap = shutil.which("bwrap")
    if bubblewrap is None:
        return [own]
    return [replace(own, bubblewrap=bubblewrap, barriers=BUBBLEWRAP_BARRIERS), own]


@functools.cache
def own_sandbox() -> Sandbox:
    """Landlock and seccomp; root starts it as the user nobody."""
    folder = Path(runtime_folder().name)
    as_nobody = os.geteuid() == 0
    interpreter = interpreter_for_nobody(folder) if as_nobody else running_interpreter()
    code = str(copy_child_code(folder / "code"))
    read_paths = (*interpreter.read_paths, code)
    return Sandbox(interpreter.path, code, read_paths, interpreter.environment, as_nobody)


@functools.cache
def runtime_folder() -> "tempfile.TemporaryDirectory[str]":
    """Every user can enter it; removed at the end of the process."""
    folder = tempfile.TemporaryDirectory(prefix="peagle-sandbox-runtime-")
    os.chmod(folder.name, 0o755)
    return folder


def copy_child_code(folder: Path) -> Path:
    """child/ as a program of its own, which imports nothing else of this package."""
    parts = CHILD_PACKAGE.split(".")
    package = folder.joinpath(*parts)
    shutil.copytree(
        CHILD, package, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True
    )
    for level in range(1, len(parts)):
        folder.joinpath(*parts[:level], "__init__.py").touch()
    (folder / "__main__.py").write_text(f"from {CHILD_PACKAGE}.main import main\n\nmain()\n")
    compileall.compile_dir(folder, quiet=1)
    open_to_all(folder)
    return folder
