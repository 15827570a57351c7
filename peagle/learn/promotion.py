"""Promotion: a candidate that has won becomes the current version."""

from dataclasses import replace

from peagle.learn.events import append_event
from peagle.learn.file_lock import locked
from peagle.learn.folder import LearnFolder
from peagle.learn.versions import (
    VersionRecord,
    list_versions,
    prune_versions,
    read_current,
    write_current,
    write_version,
)


def promote_candidates(folder: LearnFolder) -> VersionRecord | None:
    """Promote the newest candidate, if it was trained from the current version.

    Returns its record. Candidates of another parent were overtaken, as by a rollback.
    """
    with locked(folder.versions_lock):  # A rollback meanwhile is not overwritten.
        return _promote(folder)


def _promote(folder: LearnFolder) -> VersionRecord | None:
    candidates = [record for record in list_versions(folder) if record.state == "candidate"]
    promoted = None
    for record in reversed(candidates):
        if promoted is None and record.parent == read_current(folder).number:
            write_current(folder, record.number, record.reason)
            promoted = replace(record, state="promoted")
            write_version(folder, promoted)
            text = f"version {record.number} replaces {record.parent}: {record.reason}"
            append_event(folder.events, "promoted", text, record.number)
        else:
            reason = f"version {record.parent}, its parent, is not the current one any more"
            write_version(folder, replace(record, state="rejected", reason=reason))
            append_event(folder.events, "rejected", reason, record.number)
    prune_versions(folder)
    return promoted
