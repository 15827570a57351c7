"""Compile the modules that a command is about to import, on all cores, where bytecode is missing.

Without bytecode, half of the time in which Python imports torch and transformers is spent on
compiling them, one module after the other. Here other processes compile modules ahead of the
import, in its order, and the import finds their bytecode:

    processes      compile 1, 9, ... | compile 2, 10, ... | ...
    this process   import 1, import 2, import 3, ...

imported_files.txt lists the files (tools/imported_files.py). A file that is missing in it, or that
other versions of a package do not have, costs nothing but time.
"""

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import cache_from_source
from pathlib import Path

from peagle.cli import bytecode_worker
from peagle.paths import is_writable

# The commands that load a model.
MODEL_COMMANDS = frozenset({"generate", "demo", "serve", "evaluate", "bench", "tune", "bench-step"})
FILE_LIST = Path(__file__).with_name("imported_files.txt")
MIN_FILES = 100  # Fewer files are compiled while processes would start.
MAX_PROCESSES = 15


def loads_models(arguments: list[str]) -> bool:
    """Whether the command of these arguments, `sys.argv`, loads a model.

    Its name is the first argument, or that of the program (`serve`, in a container).
    """
    return any(Path(argument).name in MODEL_COMMANDS for argument in arguments[:2])


def compile_missing(files: Path = FILE_LIST) -> "subprocess.Popen[bytes] | None":
    """Start to compile listed files that have no bytecode, and return at once.

    None: nothing is to be compiled, or Python writes no bytecode here.
    """
    processes = min(usable_cores() - 1, MAX_PROCESSES)
    if sys.dont_write_bytecode or sys.flags.optimize or not hasattr(os, "fork") or processes < 1:
        return None
    missing = [source for source in sources(files) if not is_compiled(source)]
    if len(missing) < MIN_FILES or not is_writable(Path(cache_from_source(missing[0])).parent):
        return None
    try:
        return start(missing, processes)
    except OSError:
        return None


def start(paths: list[str], processes: int) -> "subprocess.Popen[bytes]":
    prefix = f"pycache_prefix={sys.pycache_prefix or ''}"
    command = [sys.executable, "-I", "-S", "-X", prefix, bytecode_worker.__file__, str(processes)]
    with tempfile.TemporaryFile() as listing:
        listing.write(os.fsencode("\n".join(paths)))
        listing.seek(0)
        process = subprocess.Popen(
            command,
            stdin=listing,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C need not end it.
        )
    threading.Thread(target=process.wait, daemon=True).start()
    return process


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def sources(files: Path) -> Iterator[str]:
    """The listed files that are installed, in the order of the list."""
    for line in files.read_text().splitlines():
        package, _, rest = line.partition("/")
        folder = package_folder(package.removesuffix(".py"))
        if folder is not None:
            yield f"{folder}/{package}/{rest}" if rest else f"{folder}/{package}"


@cache
def package_folder(package: str) -> str | None:
    """The folder in which a package lies; None if it is not installed."""
    spec = PathFinder.find_spec(package)
    if spec is None or spec.origin is None or not spec.has_location:
        return None
    source = Path(spec.origin)
    return str(source.parents[1] if source.name == "__init__.py" else source.parent)


def is_compiled(source: str) -> bool:
    return os.path.exists(cache_from_source(source)) or not os.path.exists(source)
