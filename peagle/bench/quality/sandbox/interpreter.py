"""A Python that the user nobody can start: the running one, or a copy of its standard library.

pyenv, uv and conda under a private home (/root has mode 700) are out of nobody's reach.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from peagle.bench.quality.sandbox.sandbox import NOBODY_ID, SandboxError

SYSTEM_PATHS = (
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/local/lib",
    "/usr/share/zoneinfo",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/nix/store",
)
LEFT_OUT = (
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "tkinter",
    "turtledemo",
    "ensurepip",
    "config-*",
    "*.a",
)
# Imports every extension module, then prints the shared libraries that were loaded for them.
LIST_LIBRARIES = """
import os, sys
folder = sys.argv[1]
for name in os.listdir(folder) if os.path.isdir(folder) else ():
    try:
        __import__(name.split(".")[0])
    except ImportError:
        pass
with open("/proc/self/maps") as maps:
    print(*sorted({line.split(maxsplit=5)[5].strip() for line in maps if ".so" in line}), sep="\\n")
"""
TRY_IMPORTS = "import ctypes, decimal, json, random, resource"
START_SECONDS = 60.0


@dataclass(frozen=True)
class Interpreter:
    path: str
    read_paths: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()


def running_interpreter() -> Interpreter:
    """That of a virtual environment is a link to another one, which has the standard library."""
    path = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    folders = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
    library_path = os.environ.get("LD_LIBRARY_PATH", "")  # some need it for libpython
    folders += [sysconfig.get_config_var("LIBDIR"), *library_path.split(":")]
    folders = [os.path.abspath(folder) for folder in folders if folder]
    real = [os.path.realpath(folder) for folder in folders]
    return Interpreter(
        path,
        tuple(dict.fromkeys([*folders, *real, *SYSTEM_PATHS])),
        (("LD_LIBRARY_PATH", library_path),) if library_path else (),
    )


def interpreter_for_nobody(folder: Path) -> Interpreter:
    """A copy in `folder` if nobody cannot start the running one. Only root can ask."""
    running = running_interpreter()
    if nobody_starts(running):
        return running
    try:
        copy = copy_interpreter(running, Path(tempfile.mkdtemp(prefix="python-", dir=folder)))
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxError(
            f"Python cannot be copied to {folder} for the user nobody ({error}): run peagle as an"
            " ordinary user, or set TMPDIR to a folder with 200 MB of space"
        ) from error
    if not nobody_starts(copy):
        raise SandboxError(
            f"the user nobody can start neither {running.path} nor a copy of it in {folder}: run"
            " peagle as an ordinary user, use a Python that every user can read, or set TMPDIR to a"
            " folder that every user can enter and that is not mounted noexec"
        )
    return copy


def nobody_starts(interpreter: Interpreter) -> bool:
    try:
        result = subprocess.run(
            [interpreter.path, "-I", "-S", "-c", TRY_IMPORTS],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env=dict(interpreter.environment),
            user=NOBODY_ID,
            group=NOBODY_ID,
            extra_groups=(),
            timeout=START_SECONDS,
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return result.returncode == 0


def copy_interpreter(running: Interpreter, folder: Path) -> Interpreter:
    """Python finds its standard library beside its own file: bin/python3.x, lib/python3.x."""
    name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    path = folder / "bin" / name
    path.parent.mkdir()
    shutil.copy2(running.path, path)
    ignore = shutil.ignore_patterns(*LEFT_OUT)
    for scheme, place in (("stdlib", "lib"), ("platstdlib", sys.platlibdir)):
        shutil.copytree(
            sysconfig.get_path(scheme), folder / place / name, ignore=ignore, dirs_exist_ok=True
        )
    libraries = folder / "libraries"
    libraries.mkdir()
    for library in private_libraries(running.path):
        shutil.copy2(library, libraries)
    open_to_all(folder)
    return Interpreter(
        str(path), (str(folder), *SYSTEM_PATHS), (("LD_LIBRARY_PATH", str(libraries)),)
    )


def private_libraries(interpreter: str) -> list[str]:
    """The shared libraries of Python and its extension modules outside the system's folders."""
    extensions = os.path.join(sysconfig.get_path("platstdlib"), "lib-dynload")
    output = subprocess.run(
        [interpreter, "-I", "-S", "-c", LIST_LIBRARIES, extensions],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
        timeout=START_SECONDS,
    ).stdout
    system = tuple(f"{path}/" for path in SYSTEM_PATHS)
    return [
        path
        for path in output.split("\n")
        if path and not path.startswith((*system, extensions)) and os.path.isfile(path)
    ]


def open_to_all(folder: Path) -> None:
    for place, _, names in os.walk(folder):
        os.chmod(place, 0o755)
        for name in names:
            path = os.path.join(place, name)
            if not os.path.islink(path):
                os.chmod(path, 0o755 if os.stat(path).st_mode & 0o100 else 0o644)
