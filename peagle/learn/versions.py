"""The versions of a drafter in a learn folder: records, the current version, rollback, pruning.

Version 0 is the drafter that the pair ships; it has no folder. DIR/versions/0001 is a drafter in
the compact format, with its record in version.json. DIR/current.json names the version that the
server loads.
"""

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from peagle.core import Method
from peagle.errors import UserError
from peagle.learn.file_lock import locked
from peagle.learn.folder import LearnFolder
from peagle.paths import write_json

RECORD_FILE = "version.json"
MAX_KEPT_VERSIONS = 8  # versions whose weights are kept, beside those that a rollback needs

VersionState = Literal["candidate", "promoted", "rejected", "rolled back"]


@dataclass(frozen=True, slots=True)
class LengthComparison:
    """Acceptance lengths of two drafters on the same answers, as chains of K drafts."""

    k: int
    documents: int
    before: float
    after: float
    low: float  # bounds of the confidence interval of after / before
    high: float

    @property
    def ratio(self) -> float:
        return self.after / self.before


@dataclass(frozen=True, slots=True)
class VersionRecord:
    number: int
    parent: int  # the version that it was trained from
    time: float  # seconds since the epoch, when it was judged
    method: Method
    base: str  # digest of the drafter that the pair ships
    state: VersionState
    reason: str  # why it has this state
    documents: int = 0  # that it was trained on
    tokens: int = 0  # of these documents
    steps: int = 0
    seconds: float = 0.0  # of training
    mixed: float = 1.0  # share of the trained weights; the rest is the parent's
    held_back: LengthComparison | None = None  # on answers of the traffic that were held back
    replay: LengthComparison | None = None  # with version 0, on held-out answers of the replay


@dataclass(frozen=True, slots=True)
class CurrentVersion:
    number: int = 0
    since: float = 0.0  # seconds since the epoch
    reason: str = "the drafter of the pair"


def version_folder(folder: LearnFolder, number: int) -> Path:
    """The drafter folder of a version; version 0 has none."""
    return folder.versions / f"{number:04d}"


def list_versions(folder: LearnFolder) -> list[VersionRecord]:
    """The records of all versions, the oldest first; folders without a readable one are skipped."""
    return sorted(_read_records(folder), key=lambda record: record.number)


def _read_records(folder: LearnFolder) -> Iterator[VersionRecord]:
    for path in folder.versions.glob(f"[0-9]*/{RECORD_FILE}"):
        try:
            yield _record_from_json(json.loads(path.read_text()))
        except (OSError, ValueError, TypeError, AttributeError):
            continue


def _record_from_json(raw: dict[str, Any]) -> VersionRecord:
    known = {field.name for field in fields(VersionRecord)}
    values = {key: value for key, value in raw.items() if key in known}
    for key in ("held_back", "replay"):
        if values.get(key) is not None:
            values[key] = LengthComparison(**values[key])
    return VersionRecord(**values)


def read_version(folder: LearnFolder, number: int) -> VersionRecord:
    for record in list_versions(folder):
        if record.number == number:
            return record
    known = ", ".join(str(record.number) for record in list_versions(folder))
    raise UserError(
        f"{folder.root} has no version {number}: it has 0 (the drafter of the pair)"
        + (f" and {known}" if known else "")
    )


def write_version(folder: LearnFolder, record: VersionRecord) -> None:
    write_json(version_folder(folder, record.number) / RECORD_FILE, asdict(record))


def next_number(folder: LearnFolder) -> int:
    """The number of a new version: numbers are never used again."""
    numbers = [int(path.name) for path in folder.versions.glob("[0-9]*") if path.name.isdigit()]
    return max([0, *numbers]) + 1


def read_current(folder: LearnFolder) -> CurrentVersion:
    """The current version; that of the pair if there is no file."""
    try:
        raw = json.loads(folder.current.read_text())
        return CurrentVersion(int(raw["number"]), float(raw["since"]), str(raw["reason"]))
    except FileNotFoundError:
        return CurrentVersion()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"cannot read {folder.current} ({error}): remove it to use the drafter of the pair,"
            " or run `peagle learn rollback --version N`"
        ) from error


def set_current(folder: LearnFolder, number: int, reason: str) -> CurrentVersion:
    """Make a version the current one. Servers that watch the folder swap it in."""
    with locked(folder.versions_lock):
        return write_current(folder, number, reason)


def write_current(folder: LearnFolder, number: int, reason: str) -> CurrentVersion:
    """`set_current` for a caller that holds the lock of the versions."""
    if number:
        read_version(folder, number)
        if not (version_folder(folder, number) / "model.safetensors").is_file():
            raise UserError(f"the weights of version {number} were removed: choose another version")
    current = CurrentVersion(number, time.time(), reason)
    write_json(folder.current, asdict(current))
    return current


def rollback(folder: LearnFolder, number: int | None = None) -> CurrentVersion:
    """Return to a version, by default to the one that the current version was trained from.

    The versions that are left behind are marked as rolled back.
    """
    with locked(folder.versions_lock):
        return _rollback(folder, number)


def _rollback(folder: LearnFolder, number: int | None) -> CurrentVersion:
    current = read_current(folder)
    if number is None:
        if not current.number:
            raise UserError("version 0, the drafter of the pair, is the current one already")
        number = read_version(folder, current.number).parent
    changed = write_current(folder, number, f"rolled back from version {current.number}")
    kept = lineage(folder, number)
    for left in lineage(folder, current.number):
        if left in kept:
            break
        record = read_version(folder, left)
        write_version(folder, replace(record, state="rolled back", reason="a rollback left it"))
    return changed


def lineage(folder: LearnFolder, number: int) -> list[int]:
    """The version, its parent, and so on, without version 0."""
    parents = {record.number: record.parent for record in list_versions(folder)}
    chain = []
    while number in parents and number not in chain:
        chain.append(number)
        number = parents[number]
    return chain


def prune_versions(folder: LearnFolder, kept: int = MAX_KEPT_VERSIONS) -> list[int]:
    """Remove the weights of old versions; records stay. Returns their numbers.

    The newest `kept` stay, and the current version, its parent and every version that was rolled
    back or is the parent of one: a rollback may return to them.
    """
    records = list_versions(folder)
    current = read_current(folder).number
    needed = {record.number for record in records[-kept:]} | {current}
    for record in records:
        if record.state == "rolled back":
            needed |= {record.number, record.parent}
        if record.number == current:
            needed.add(record.parent)
    removed = []
    for record in records:
        weights = version_folder(folder, record.number) / "model.safetensors"
        if record.number not in needed and weights.is_file():
            weights.unlink()
            removed.append(record.number)
    return removed


def drafter_digest(folder: Path) -> str:
    """The digest of a drafter's files."""
    digest = hashlib.sha256()
    for file in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        with file.open("rb") as content:
            digest.update(file.name.encode() + hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()[:32]


def check_base(folder: LearnFolder, base: str) -> None:
    """Refuse a folder whose versions were trained from another drafter than this one."""
    for record in list_versions(folder):
        if record.base != base:
            raise UserError(
                f"version {record.number} in {folder.root} was trained from another drafter than"
                " that of this pair: use another folder, or serve with the former drafter"
            )
