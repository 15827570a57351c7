"""The reports of the engine processes on learning, summed as /metrics and the status show them."""

from collections.abc import Mapping
from typing import Any

from peagle.server.messages import LearnReport, VersionCounts

Reports = Mapping[str, LearnReport]  # By the name of the process.


def store_counts(reports: Reports) -> dict[str, int]:
    """What the processes that run now have stored."""
    names = ("documents", "tokens", "dropped")
    return {name: sum(getattr(report, name) for report in reports.values()) for name in names}


def version_counts(reports: Reports) -> dict[int, VersionCounts]:
    """What each version has drafted, over all processes."""
    totals: dict[int, VersionCounts] = {}
    for report in reports.values():
        for number, counts in report.versions.items():
            total = totals.setdefault(number, VersionCounts())
            total.drafts += counts.drafts
            total.accepted_tokens += counts.accepted_tokens
    return totals


def acceptance_length(counts: VersionCounts | None) -> float | None:
    """Tokens per pass that verified drafts, the bonus token included; None: there was no draft."""
    if counts is None or not counts.drafts:
        return None
    return round(1 + counts.accepted_tokens / counts.drafts, 4)


def failure_of(reports: Reports) -> str | None:
    """Why learning is off, or why documents or versions are not stored or loaded."""
    for report in reports.values():
        reason = report.failure or report.version_failure or report.store_failure
        if reason is not None:
            return reason
    return None


def describe_processes(reports: Reports) -> dict[str, Any]:
    return {name: report.version for name, report in reports.items()}
