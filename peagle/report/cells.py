"""Tables of the page: every metric of every cell, the output check, scores, failures."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from peagle.report.grid import Grid
from peagle.report.machines import Machine
from peagle.report.words import (
    DASH,
    amount,
    cell_label,
    draft_label,
    gigabytes,
    k_order,
    method_order,
    percent,
    share,
    times,
)
from peagle.results.cell import BenchCell
from peagle.results.key import variant_name
from peagle.results.quality import AnswerDifference, OutputCheck

MAX_SHOWN_DIFFERENCES = 3
MAX_ERROR_CHARACTERS = 300
CellText = Callable[[Grid, BenchCell], str]


@dataclass(frozen=True)
class Table:
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    heads: int = 1  # the first columns, which are row headers
    best: frozenset[int] = frozenset()  # rows to highlight
    long: bool = False  # the last column is prose

    @property
    def length(self) -> int:
        return len(self.rows)


def metric_text(name: str, text: Callable[[float | None], str] = amount) -> CellText:
    return lambda _, cell: text(cell.metric(name))


def median_and_p99(latency: str) -> CellText:
    def text(_: Grid, cell: BenchCell) -> str:
        median = cell.metric(f"median_{latency}_ms")
        p99 = cell.metric(f"p99_{latency}_ms")
        return DASH if median is None and p99 is None else f"{amount(median)} / {amount(p99)}"

    return text


def spread_text(_: Grid, cell: BenchCell) -> str:
    if cell.spread is None:
        return DASH
    low, high = cell.spread
    return f"{amount(low)} to {amount(high)}"


def speedup_text(grid: Grid, cell: BenchCell) -> str:
    speedup = grid.speedup(cell)
    return times(speedup.value) if speedup and cell.variant != "none" else DASH


def failed_text(_: Grid, cell: BenchCell) -> str:
    return DASH if cell.failed is None else f"{cell.failed:,} of {cell.requests or 0:,}"


def identical_text(_: Grid, cell: BenchCell) -> str:
    """Answers that equal those of plain decoding."""
    return DASH if cell.check is None else check_texts([cell.check])[0]


COLUMNS: tuple[tuple[str, CellText], ...] = (
    ("tokens/s", metric_text("output_throughput")),
    ("spread", spread_text),
    ("× none", speedup_text),
    ("per user", lambda _, cell: amount(cell.user_throughput)),
    ("TTFT ms, median / p99", median_and_p99("ttft")),
    ("TPOT ms, median / p99", median_and_p99("tpot")),
    ("ITL ms, median / p99", median_and_p99("itl")),
    ("acceptance length", metric_text("spec_decode_acceptance_length")),
    ("acceptance rate", metric_text("spec_decode_acceptance_rate", percent)),
    ("step ms", metric_text("step_ms")),
    ("drafter's share", metric_text("drafter_share", share)),
    ("GPU memory", metric_text("gpu_memory_bytes", gigabytes)),
    ("J/token", lambda _, cell: amount(cell.joules_per_token, 3)),
    ("identical answers", identical_text),
    ("failed", failed_text),
)


def cell_table(grid: Grid, caption: str) -> Table:
    """Every cell by concurrency, the fastest of each highlighted. Empty columns are left out."""
    cells = sorted(grid.cells, key=lambda c: (c.concurrency, method_order(c.variant), k_order(c.k)))
    texts = [[text(grid, cell) for _, text in COLUMNS] for cell in cells]
    shown = [i for i in range(len(COLUMNS)) if i == 0 or any(row[i] != DASH for row in texts)]
    rows = [
        (str(cell.concurrency), cell_label(cell), *(row[i] for i in shown))
        for cell, row in zip(cells, texts, strict=True)
    ]
    fastest = [grid.best(c) for c in grid.concurrencies]
    fastest_keys = {cell.key for cell in fastest if cell is not None}
    highlighted = frozenset(i for i, cell in enumerate(cells) if cell.key in fastest_keys)
    columns = ("at a time", "method", *(COLUMNS[i][0] for i in shown))
    return Table(caption, columns, tuple(rows), 2, highlighted)


def check_table(machines: Sequence[Machine]) -> Table:
    """Answers against those of plain decoding, summed over concurrency."""
    checks: dict[tuple[str, ...], list[OutputCheck]] = {}
    for machine in machines:
        for cell in sorted(machine.cells, key=lambda c: (method_order(c.variant), k_order(c.k))):
            if cell.check is not None:
                name = (machine.label, cell.set, cell_label(cell))
                checks.setdefault(name, []).append(cell.check)
    rows = [(*name, *check_texts(cell_checks)) for name, cell_checks in checks.items()]
    rows.sort(key=lambda row: row[-1] == DASH)  # differences first
    columns = ("machine", "set", "method", "identical", "share", "first differences")
    return Table("Answers against none's, token by token", columns, tuple(rows), 3, long=True)


def check_texts(checks: Sequence[OutputCheck]) -> tuple[str, str, str]:
    compared = sum(check.compared for check in checks)
    identical = sum(check.identical for check in checks)
    differences = list(
        dict.fromkeys(difference_text(d) for check in checks for d in check.differences)
    )
    hidden = len(differences) - MAX_SHOWN_DIFFERENCES
    text = "; ".join(differences[:MAX_SHOWN_DIFFERENCES])
    text += f"; {hidden} more" if hidden > 0 else ""
    rate = share(identical / compared) if compared else DASH
    return f"{identical:,} of {compared:,}", rate, text or DASH


def difference_text(difference: AnswerDifference) -> str:
    position = DASH if difference.position is None else difference.position
    margin = f" (margin {difference.margin:.2g})" if difference.margin is not None else ""
    return f"{difference.task} at token {position}{margin}"


def score_table(machines: Sequence[Machine]) -> Table:
    rows = [
        (
            machine.label,
            score.set,
            draft_label(
                variant_name(score.method, score.tree), 0 if score.method == "none" else score.k
            ),
            score.metric,
            f"{share(score.value)} of {score.of:,}",
        )
        for machine in machines
        for result in machine.results
        for score in result.scores
    ]
    columns = ("machine", "set", "method", "metric", "score")
    return Table("Are the answers as good?", columns, tuple(rows), 3)


def failure_table(machines: Sequence[Machine]) -> Table:
    rows = [
        (
            machine.label,
            cell.set,
            f"{cell_label(cell)}, {cell.concurrency} at a time",
            f"{cell.failed or 0} of {cell.requests or 0}",
            (cell.first_error or DASH)[:MAX_ERROR_CHARACTERS],
        )
        for machine in machines
        for cell in machine.cells
        if cell.failed or cell.throughput is None or cell.first_error
    ]
    columns = ("machine", "set", "cell", "failed", "first error")
    return Table("Failed requests", columns, tuple(rows), 3, long=True)
