"""Panel: the charts and tables of one set, or of the mean over all sets."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from peagle.report.cells import Table, cell_table
from peagle.report.charts import draw, inline_svg
from peagle.report.figure import Figure, slug
from peagle.report.figures import figures
from peagle.report.grid import OVERALL, Grid
from peagle.report.machines import Machine
from peagle.report.words import (
    DASH,
    METHOD_LABELS,
    TREE,
    amount,
    cell_label,
    join_words,
    method_label,
    times,
)

MachineGrids = Sequence[tuple[Machine, Mapping[str, Grid]]]  # each machine with its grids by set


@dataclass(frozen=True)
class Chart:
    """A figure of one machine, drawn."""

    name: str
    title: str
    note: str
    machine: str
    svg: str
    png: bytes


@dataclass(frozen=True)
class Tile:
    """The winner at one concurrency."""

    concurrency: int
    method: str  # a CSS class
    name: str
    k: str
    gain: str
    speed: str
    level: str  # the methods that are level with it


@dataclass(frozen=True)
class Strip:
    """The winners of one machine."""

    machine: str
    tiles: list[Tile]


@dataclass(frozen=True)
class Panel:
    name: str
    title: str
    rows: list[list[Chart]]  # a row for each figure, in it a chart for each machine
    strips: list[Strip]
    tables: list[Table]


@dataclass(frozen=True)
class PanelBuilder:
    """Builds the panels of a page."""

    machine_grids: MachineGrids
    set_names: Sequence[str]
    on_chart: Callable[[], None]  # called after every chart

    def build(self, name: str, index: int) -> Panel:
        """The panel of one set. Only the first panel of a page has PNGs."""
        grids = [
            (machine, by_set[name]) for machine, by_set in self.machine_grids if name in by_set
        ]
        rows: dict[str, list[Chart]] = {}
        for column, (machine, grid) in enumerate(grids):
            for figure in figures(grid):
                chart = self._chart(figure, machine, name, index, column)
                rows.setdefault(figure.name, []).append(chart)
                self.on_chart()
        return Panel(
            name,
            self._title(name),
            list(rows.values()),
            [winner_strip(machine, grid) for machine, grid in grids],
            [cell_table(grid, f"{name}, {machine.label}") for machine, grid in grids],
        )

    def _chart(self, figure: Figure, machine: Machine, name: str, index: int, column: int) -> Chart:
        file_name = figure.name
        if len(self.machine_grids) > 1:
            file_name += f"-{column + 1}-{slug(machine.label)}"
        sets = f"mean of {join_words(self.set_names)}" if name == OVERALL else name
        where = f"{machine.label}, {sets}"
        caption = f"{machine.results[0].info.pair_name}, {where}"
        svg, png = draw(figure, caption if index == 0 else None)
        prefix = f"p{index}m{column}-{figure.name}"
        inlined = inline_svg(svg, prefix, figure.title, f"{where}. {figure.description}")
        return Chart(file_name, figure.title, figure.note, machine.label, inlined, png)

    def _title(self, name: str) -> str:
        if name != OVERALL:
            return name
        complete = all(set(self.set_names) <= by_set.keys() for _, by_set in self.machine_grids)
        if complete:
            return f"Mean of {join_words(self.set_names)}"
        return "Mean over each machine's sets"


def winner_strip(machine: Machine, grid: Grid) -> Strip:
    return Strip(machine.label, [winner_tile(grid, c) for c in grid.concurrencies])


def winner_tile(grid: Grid, concurrency: int) -> Tile:
    best, *tied = grid.winners(concurrency)
    speedup = grid.speedup(best)
    method = best.variant.partition(TREE)[0]
    gain = times(speedup.value) if speedup else DASH
    return Tile(
        concurrency=concurrency,
        method=method if method in METHOD_LABELS else "other",
        name=method_label(best.variant),
        k="" if best.variant == "none" else f"K={best.k}",
        gain="1×" if best.variant == "none" else gain,
        speed=amount(best.throughput),
        level=join_words([cell_label(rival) for rival in tied]),
    )
