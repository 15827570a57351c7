"""The bytecode of installed packages, compiled before the start of a server is measured."""

import os
import subprocess
import sys
import sysconfig
import time
from importlib.util import find_spec
from pathlib import Path
from shutil import rmtree

from benchmarks.server.process import ROOT
from peagle.paths import cache_home

FILE_LIST = ROOT / "peagle" / "cli" / "imported_files.txt"  # What `generate` imports.
SERVE_PACKAGES = (
    *("peagle", "fastapi", "starlette", "pydantic", "pydantic_core", "annotated_types"),
    *("typing_inspection", "uvicorn", "httptools", "uvloop", "click", "sniffio"),
    *("prometheus_client", "llguidance", "msgspec", "zmq", "opentelemetry", "sympy", "mpmath"),
)
UNUSED_STANDARD = frozenset({"test", "idlelib", "lib2to3", "site-packages", "dist-packages"})


def bytecode_cache() -> Path:
    """Of all parts; where packages have none and Python writes none, `peagle` keeps it there."""
    return cache_home() / "bytecode"


def bytecode_variables() -> dict[str, str]:
    """The environment of processes that read bytecode from `bytecode_cache`, and write it there."""
    return {"PYTHONPYCACHEPREFIX": str(bytecode_cache()), "PYTHONDONTWRITEBYTECODE": ""}


def compile_bytecode() -> None:
    """Compile what pip compiles when it installs `peagle[serve]`, and the standard library.

    With a folder of its own, this does not depend on whether this machine has bytecode. Files of
    other packages are compiled when they are imported, and then kept.
    """
    started = time.perf_counter()
    rmtree(bytecode_cache(), ignore_errors=True)
    command = [sys.executable, "-m", "compileall", "-q", "-j", "0", *map(str, installed_sources())]
    # A package may contain files that are not valid Python: pip ignores them, too.
    subprocess.run(
        command, env={**os.environ, **bytecode_variables()}, stdout=subprocess.DEVNULL, check=False
    )
    print(f"bytecode compiled in {time.perf_counter() - started:.1f} s", flush=True)


def installed_sources() -> list[Path]:
    """The folders of packages, and the files of modules without one."""
    listed = FILE_LIST.read_text().splitlines()
    packages = {line.partition("/")[0].removesuffix(".py") for line in listed}
    sources = [package_source(name) for name in sorted(packages.union(SERVE_PACKAGES))]
    library = Path(sysconfig.get_path("stdlib"))
    standard = [path for path in library.iterdir() if path.name not in UNUSED_STANDARD]
    sources += [x for x in standard if x.suffix == ".py" or (x / "__init__.py").exists()]
    return [source for source in sources if source is not None]


def package_source(name: str) -> Path | None:
    """None if the package is not installed, or has no Python files."""
    spec = find_spec(name)
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    is_python = spec.origin is not None and spec.origin.endswith(".py")
    return Path(str(spec.origin)) if is_python else None
