"""Summary: a machine's verdict and its main facts, at the top of the page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from peagle.report.grid import OVERALL, Grid
from peagle.report.machines import Machine
from peagle.report.verdict import eagle3_sentence, verdict
from peagle.report.words import amount, cell_label, join_words, method_label, share, times
from peagle.results.cell import BenchCell
from peagle.results.json_values import as_object

MAX_IMPERFECT_SHARE = 0.999  # shown where answers differ, so that it never rounds to 100%


@dataclass(frozen=True)
class Fact:
    value: str
    meaning: str
    where: str


@dataclass(frozen=True)
class Summary:
    machine: str
    sentence: str
    eagle3_sentence: str | None
    caveat: str
    facts: list[Fact]
    averaged_over: str  # what the speed-ups are a mean of


def summarize(machine: Machine, grids: Mapping[str, Grid]) -> Summary:
    name, grid = next(iter(grids.items()))
    return Summary(
        machine.label,
        verdict(grid),
        eagle3_sentence(grid),
        caveat(machine),
        [*speed_facts(grid), *quality_facts(machine)],
        "geometric mean over sets" if name == OVERALL else name,
    )


def speed_facts(grid: Grid) -> list[Fact]:
    facts = []
    speedups = [
        (ratio.value, cell)
        for cell in grid.measured
        if cell.variant != "none" and (ratio := grid.speedup(cell))
    ]
    if speedups:
        speedup, cell = max(speedups, key=lambda pair: pair[0])
        meaning = (
            "largest speed-up over none" if speedup > 1 else "best speculative speed against none"
        )
        facts.append(Fact(times(speedup), meaning, place(cell)))
    if grid.measured:
        fastest = max(grid.measured, key=lambda cell: cell.throughput or 0)
        facts.append(Fact(amount(fastest.throughput), "tokens/s at most", place(fastest)))
    return facts


def place(cell: BenchCell) -> str:
    return f"{cell_label(cell)}, {cell.concurrency} at a time"


def quality_facts(machine: Machine) -> list[Fact]:
    facts = []
    checks = [cell.check for cell in machine.cells if cell.check is not None]
    compared = sum(check.compared for check in checks)
    identical = sum(check.identical for check in checks)
    if compared:
        equal = identical == compared
        rate = "100%" if equal else share(min(identical / compared, MAX_IMPERFECT_SHARE))
        where = f"{identical:,} of {compared:,}"
        facts.append(Fact(rate, "answers identical to none's", where))
    failed, requests = request_counts(machine.cells)
    if requests:
        facts.append(Fact(f"{failed:,}", "failed requests", f"of {requests:,}"))
    return facts


def caveat(machine: Machine) -> str:
    """What makes the numbers mean less than they seem to."""
    untrained = dict.fromkeys(
        method_label(method)
        for method, drafter in latest_drafters(machine).items()
        if as_object(drafter).get("trained") is False
    )
    sentences = []
    if untrained:
        sentences.append(
            f"The drafter of {join_words(list(untrained))} is untrained: its drafts are noise."
        )
    failed, requests = request_counts(machine.cells)
    if failed:
        sentences.append(f"{failed:,} of {requests:,} requests failed: see below.")
    return " ".join(sentences)


def latest_drafters(machine: Machine) -> dict[str, object]:
    drafters: dict[str, object] = {}
    for result in machine.results:
        drafters |= result.info.drafters
    return drafters


def request_counts(cells: Sequence[BenchCell]) -> tuple[int, int]:
    """Failed requests, and all of them."""
    return sum(cell.failed or 0 for cell in cells), sum(cell.requests or 0 for cell in cells)
