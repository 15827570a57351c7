"""Folders that are built once per test run, by the first worker that needs them."""

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

from filelock import FileLock

from peagle.paths import publish_folder

_root: Path | None = None


def share_between_workers(folder: Path) -> None:
    """Build in `folder`, which all workers of this run share."""
    global _root
    _root = folder


@cache
def _own_root() -> Path:
    return Path(tempfile.mkdtemp())


def built_once(name: str, build: Callable[[Path], object]) -> Path:
    """Return the folder of this name; `build` fills it once."""
    root = _root or _own_root()
    folder = root / "built" / name
    folder.parent.mkdir(exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            with publish_folder(folder) as staging:
                build(staging)
    return folder
