"""Artifact: a folder that the container reads, the target's or the drafter's, and its identity.

The identity is a digest of a pinned source (the commit of a hub, the checksum of a wheel) or, for
a folder of the user, of every byte in it. Before the first download the commit of a hub is
unknown; the identity then uses the name of the revision.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from peagle.catalog.pair import DrafterSource, Pair
from peagle.deploy.plan import Plan
from peagle.errors import UserError
from peagle.paths import cache_home
from peagle.progress import Progress, silent
from peagle.pull import RECEIPT, pull, pull_drafter, receipt, source_order, target_folder

READ_CHUNK_BYTES = 1 << 22
IDENTITY_LENGTH = 12  # hex digits


@dataclass(frozen=True, slots=True)
class Artifact:
    source: str  # description for the user
    identity: str
    folder: Path | None = None  # None: not on this machine yet

    def files(self) -> list[Path]:
        return sorted(checkpoint_files(self.folder)) if self.folder else []

    @property
    def has_tiktoken_files(self) -> bool:
        """Whether it has the tiktoken files that gpt-oss otherwise downloads at startup."""
        return any(path.suffix == ".tiktoken" for path in self.files())


def checkpoint_files(folder: Path) -> Iterator[Path]:
    """All files of the checkpoint, without the receipt and hidden files."""
    for path in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_file() and path.name != RECEIPT and not hidden:
            yield path


def target_artifact(pair: Pair, progress: Progress = silent, fetch: bool = False) -> Artifact:
    """The pair's target. The network is used only with `fetch`."""
    if fetch:
        pull(pair, None, progress)
    if pair.target.folder is not None:
        digest = hash_folder(pair.target.folder, progress)
        return Artifact(str(pair.target.folder), digest, pair.target.folder)
    folder = target_folder(pair)
    name = pair.target.hub or pair.name
    if pulled := receipt(folder):
        return pinned_artifact(f"{pulled.source} {name}", pulled.revision, folder)
    source = source_order(pair, None)[0]
    if source == "wheels" and pair.target.wheels:
        return pinned_artifact(f"wheels {name}", f"sha256:{pair.target.wheels.sha256}")
    return pinned_artifact(f"hub {pair.target.hub}", pair.target.revision or "main")


def drafter_artifact(
    plan: Plan, target: Artifact, progress: Progress = silent, fetch: bool = False
) -> Artifact:
    """The drafter in a format that vLLM reads: from the hub, or exported from its folder."""
    if plan.drafter_folder is not None:
        return exported_drafter(plan, plan.drafter_folder, target, progress, fetch)
    pair = plan.pair
    method = plan.deployment.method
    hub = plan.deployment.drafter
    source = hub_source(plan)
    if fetch:
        pull_drafter(replace(pair, drafters={method: source}), method, progress)
    folder = cache_home() / "drafters" / pair.name / method
    pulled = receipt(folder)
    if pulled and pulled.hub == hub:
        return pinned_artifact(f"hub {hub}", pulled.revision, folder)
    return pinned_artifact(f"hub {hub}", source.revision or "main")


def hub_source(plan: Plan) -> DrafterSource:
    """The pair's drafter source with the planned hub id; another hub id has no pinned revision."""
    hub = plan.deployment.drafter
    known = plan.pair.drafters.get(plan.deployment.method)
    if known is None:
        raise UserError(
            f"{hub} cannot be uploaded for {plan.pair.name}:"
            " download it and give its folder with `drafter`"
        )
    revision = known.revision if known.hub == hub else None
    return replace(known, hub=hub, folder=None, revision=revision)


def exported_drafter(
    plan: Plan, folder: Path, target: Artifact, progress: Progress, fetch: bool
) -> Artifact:
    """The drafter of `folder`, exported for vLLM into the cache.

    The export contains embeddings of the target, so its identity includes the target's.
    """
    from peagle.deploy.drafter import export_drafter

    identity = f"{hash_folder(folder, progress)} {target.identity}"
    digest = short_digest(hashlib.sha256(identity.encode()))
    exported = cache_home() / "exports" / digest
    if fetch and not exported.is_dir():
        export_drafter(folder, plan.pair, plan.deployment.k, exported, False, progress)
    return Artifact(f"{folder}, exported for vLLM", digest, exported if exported.is_dir() else None)


def pinned_artifact(source: str, revision: str, folder: Path | None = None) -> Artifact:
    digest = short_digest(hashlib.sha256(f"{source} {revision}".encode()))
    return Artifact(f"{source} at {revision}", digest, folder)


def hash_folder(folder: Path, progress: Progress = silent) -> str:
    """Short digest of the names and bytes of all files."""
    digest = hashlib.sha256()
    for path in sorted(checkpoint_files(folder)):
        name = path.relative_to(folder).as_posix()
        digest.update(f"{name} {hash_file(path, progress)}\n".encode())
    return short_digest(digest)


def hash_file(path: Path, progress: Progress = silent) -> str:
    digest = hashlib.sha256()
    done = 0
    total = path.stat().st_size
    with path.open("rb") as file:
        while chunk := file.read(READ_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            progress(f"{path.name}: reading", done, total)
    return digest.hexdigest()


def short_digest(digest: "hashlib._Hash") -> str:
    return digest.hexdigest()[:IDENTITY_LENGTH]
