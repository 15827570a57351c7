"""Artifact: one of the two folders a container reads, the target's or the drafter's, and what tells it apart.

Its identity comes from a pinned source (a hub's commit, a wheel's checksum) or, for a folder of the user's, from every
byte in it. Before anything is fetched a hub's commit is unknown: then it is the name of the revision.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from peagle.catalog.pair import Pair
from peagle.deploy.plan import Plan
from peagle.errors import UserError
from peagle.paths import cache_home
from peagle.progress import Progress, silent
from peagle.pull import RECEIPT, pull, pull_drafter, receipt, source_order, target_folder

CHUNK = 1 << 22
IDENTITY = 12


@dataclass(frozen=True, slots=True)
class Artifact:
    source: str  # for the user's eyes
    identity: str
    folder: Path | None = None  # None: not on this machine yet

    def files(self) -> list[Path]:
        return sorted(files_of(self.folder)) if self.folder else []

    @property
    def vocabularies(self) -> bool:
        """Are there files of tiktoken's, which gpt-oss otherwise fetches when it starts?"""
        return any(path.suffix == ".tiktoken" for path in self.files())


def files_of(folder: Path) -> Iterator[Path]:
    """What belongs to the checkpoint: no receipt, nothing hidden."""
    for path in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_file() and path.name != RECEIPT and not hidden:
            yield path


def target(pair: Pair, progress: Progress = silent, fetch: bool = False) -> Artifact:
    """The pair's target; only `fetch` touches the network."""
    if fetch:
        pull(pair, None, progress)
    if pair.target.folder is not None:
        digest = content(pair.target.folder, progress)
        return Artifact(str(pair.target.folder), digest, pair.target.folder)
    folder = target_folder(pair)
    if found := receipt(folder):
        return pinned(f"{found.source} {pair.target.hub or pair.name}", found.revision, folder)
    source = source_order(pair, None)[0]
    if source == "wheels" and pair.target.wheels:
        return pinned(
            f"wheels {pair.target.hub or pair.name}", f"sha256:{pair.target.wheels.sha256}"
        )
    return pinned(f"hub {pair.target.hub}", pair.target.revision or "main")


def drafter(
    plan: Plan, target: Artifact, progress: Progress = silent, fetch: bool = False
) -> Artifact:
    """In a format vLLM reads: as the hub has it, or exported from its folder."""
    if plan.drafter is not None:
        return exported(plan, plan.drafter, target, progress, fetch)
    pair, method, hub = plan.pair, plan.deployment.method, plan.deployment.drafter
    known = pair.drafters.get(method)
    source = (
        replace(known, hub=hub, folder=None, revision=known.revision if known.hub == hub else None)
        if known
        else None
    )
    if source is None:
        raise UserError(
            f"{hub} cannot be uploaded for {pair.name}: pull it and give its folder, --drafter DIR"
        )
    if fetch:
        pull_drafter(replace(pair, drafters={method: source}), method, progress)
    folder = cache_home() / "drafters" / pair.name / method
    found = receipt(folder)
    if found and found.hub == hub:
        return pinned(f"hub {hub}", found.revision, folder)
    return pinned(f"hub {hub}", source.revision or "main")


def exported(
    plan: Plan, folder: Path, target: Artifact, progress: Progress, fetch: bool
) -> Artifact:
    """What is exported holds embeddings of the target's, so it is the target's too that tells it apart."""
    from peagle.deploy.drafter import export_drafter

    digest = shortened(hashlib.sha256(f"{content(folder, progress)} {target.identity}".encode()))
    made = cache_home() / "exports" / digest
    if fetch and not made.is_dir():
        export_drafter(folder, plan.pair, plan.deployment.k, made, False, progress)
    return Artifact(f"{folder}, exported for vLLM", digest, made if made.is_dir() else None)


def pinned(source: str, revision: str, folder: Path | None = None) -> Artifact:
    return Artifact(
        f"{source} at {revision}",
        shortened(hashlib.sha256(f"{source} {revision}".encode())),
        folder,
    )


def content(folder: Path, progress: Progress = silent) -> str:
    """Of names and bytes of every file."""
    together = hashlib.sha256()
    for path in sorted(files_of(folder)):
        together.update(
            f"{path.relative_to(folder).as_posix()} {sha256(path, progress)}\n".encode()
        )
    return shortened(together)


def sha256(path: Path, progress: Progress = silent) -> str:
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            done += len(chunk)
            progress(f"{path.name}: reading", done, total)
    return digest.hexdigest()


def shortened(digest: "hashlib._Hash") -> str:
    return digest.hexdigest()[:IDENTITY]
