"""FolderState: what the files of a learn folder say, for /metrics, the status and the page."""

from dataclasses import asdict, dataclass, field
from typing import Any

from peagle.errors import UserError
from peagle.learn.events import LearnEvent, read_events
from peagle.learn.folder import LearnFolder
from peagle.learn.status import TrainerStatus, read_status
from peagle.learn.store_reader import StoreSize, store_size
from peagle.learn.versions import CurrentVersion, VersionRecord, list_versions, read_current
from peagle.server.learning.process_reports import (
    Reports,
    acceptance_length,
    describe_processes,
    failure_of,
    store_counts,
    version_counts,
)

SHOWN_EVENTS = 20


@dataclass(frozen=True, slots=True)
class FolderState:
    current: CurrentVersion = field(default_factory=CurrentVersion)
    versions: list[VersionRecord] = field(default_factory=list)
    trainer: TrainerStatus = field(default_factory=TrainerStatus)
    events: list[LearnEvent] = field(default_factory=list)
    store: StoreSize = field(default_factory=StoreSize)
    failure: str | None = None  # Why current.json cannot be read.


def read_state(folder: LearnFolder) -> FolderState:
    """Read all files; on a thread, because there may be many versions."""
    failure = None
    try:
        current = read_current(folder)
    except UserError as error:
        current = CurrentVersion()
        failure = str(error)
    return FolderState(
        current,
        list_versions(folder),
        read_status(folder),
        read_events(folder.events, SHOWN_EVENTS),
        store_size(folder),
        failure,
    )


def describe_drafter(state: FolderState, reports: Reports) -> dict[str, Any]:
    """The answer of /v1/peagle/drafter."""
    counts = version_counts(reports)
    return {
        "current": asdict(state.current),
        "engines": describe_processes(reports),
        "failure": state.failure or failure_of(reports),
        "versions": [
            asdict(record) | {"acceptance_length": acceptance_length(counts.get(record.number))}
            for record in state.versions
        ],
    }


def describe_learning(state: FolderState, reports: Reports) -> dict[str, Any]:
    """The field `learn` of /v1/peagle/status."""
    counts = version_counts(reports)
    return describe_drafter(state, reports) | {
        "store": asdict(state.store) | store_counts(reports),
        "trainer": asdict(state.trainer),
        "acceptance_lengths": {
            str(number): acceptance_length(counts[number]) for number in sorted(counts)
        },
        "events": [asdict(event) for event in state.events],
    }
