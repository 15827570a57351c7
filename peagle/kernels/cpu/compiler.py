"""The C compilers of this machine, in the order in which they are tried."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence

COMPILER_FLAGS = ("-O3", "-fPIC", "-std=gnu11", "-pthread", "-Wno-psabi")
COMPILE_TIMEOUT = 300  # seconds
VERSION_TIMEOUT = 60  # seconds
COMPILER_NAMES = (
    "gcc",
    "cc",
    "clang",
    *(f"gcc-{version}" for version in range(20, 8, -1)),
    *(f"clang-{version}" for version in range(24, 8, -1)),
)
ERROR_LINE = re.compile(r"error:|cannot find|undefined reference")  # gcc's, clang's, the linker's


def compiler_names() -> list[str]:
    chosen = os.environ.get("CC")
    return [*([chosen] if chosen else []), *COMPILER_NAMES]


def installed(compilers: Sequence[str]) -> Iterator[str]:
    """The paths of these compilers, without one that is the same as an earlier one."""
    versions: set[str] = set()
    for name in compilers:
        path = shutil.which(name)
        if path is None:
            continue
        try:
            version = compiler_version(path) or path
        except (OSError, subprocess.SubprocessError):
            version = path  # `load_or_build` fails too, and reports the reason
        if version not in versions:
            versions.add(version)
            yield path


def compiler_version(compiler: str) -> str:
    """What `--version` prints, without the name of the program: cc is often gcc or clang."""
    return run([compiler, "--version"], VERSION_TIMEOUT).partition(" ")[2]


def failure_reason(error: Exception) -> str:
    """The first error of a compiler or linker; the lines behind it repeat and underline it."""
    output = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    first = next((line for line in lines if ERROR_LINE.search(line)), None)
    return first or (lines[0] if lines else "no reason given")


def run(command: list[str], timeout: float = COMPILE_TIMEOUT) -> str:
    """Run a compiler, with messages in English; return what it prints."""
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout,
        check=True,
        env=os.environ | {"LC_ALL": "C"},
    ).stdout
