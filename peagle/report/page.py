"""One HTML page that holds everything, and the PNGs beside it. Same results, same bytes."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from peagle.paths import write_bytes
from peagle.report import cells
from peagle.report.charts import draw, inline
from peagle.report.figures import figures, slug
from peagle.report.grid import OVERALL, Grid, grids, sets_of
from peagle.report.machines import Machine
from peagle.report.markdown import load, markdown
from peagle.report.palette import DARK, LIGHT, css
from peagle.report.verdict import against_eagle3, verdict
from peagle.report.words import METHODS, TREE, amount, label, listed, method_label, share, times
from peagle.results.runs import ResultRun


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
class Panel:
    """A set, or the mean of all: charts in rows (a row a figure, a chart a machine), strips, tables."""

    name: str
    title: str
    rows: list[list[Chart]]
    strips: list[dict[str, Any]]
    tables: list[cells.Table]


def build(
    machines: list[Machine], tick: Callable[[], None] = lambda: None
) -> tuple[str, dict[str, bytes]]:
    """The page, and pictures by file name: of the mean, or of the only set."""
    names = sets_of(cell for machine in machines for cell in machine.cells)
    found = [grids(machine.cells, names) for machine in machines]
    order = [name for name in (OVERALL, *names) if any(name in grid for grid in found)]
    panels = [panel(name, i, machines, found, names, tick) for i, name in enumerate(order)]
    pictures = {f"{chart.name}.png": chart.png for row in panels[0].rows for chart in row}
    first = machines[0].runs[0]
    page = (
        environment()
        .get_template("page.html")
        .render(
            title=first.pair,
            target=first.target,
            load=load(first, listed(names)),
            verdicts=[told(machine, grid) for machine, grid in zip(machines, found, strict=True)],
            panels=panels,
            tables=[
                t
                for t in (cells.checks(machines), cells.scores(machines), cells.failures(machines))
                if t.rows
            ],
            runs=[(machine.label, facts(run)) for machine in machines for run in machine.runs],
            markdown=markdown(machines),
            light=css(LIGHT),
            dark=css(DARK),
        )
    )
    return page, pictures


def environment() -> Any:
    """Result files are someone's text: everything is escaped."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    def read(name: str) -> str:
        return (files("peagle.report") / "template" / name).read_text(encoding="utf-8")

    return Environment(
        loader=FunctionLoader(read),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def panel(
    name: str,
    index: int,
    machines: list[Machine],
    found: list[dict[str, Grid]],
    names: list[str],
    tick: Callable[[], None],
) -> Panel:
    held = [
        (machine, grid[name]) for machine, grid in zip(machines, found, strict=True) if name in grid
    ]
    rows: dict[str, list[Chart]] = {}
    for place, (machine, grid) in enumerate(held):
        for figure in figures(grid):
            file = (
                figure.name
                if len(machines) == 1
                else f"{figure.name}-{place + 1}-{slug(machine.label)}"
            )
            where = f"{machine.label}, {name if name != OVERALL else f'mean of {listed(names)}'}"
            svg, png = draw(figure, f"{machine.runs[0].pair}, {where}" if index == 0 else None)
            words = f"{where}. {figure.words}"
            drawn = inline(svg, f"p{index}m{place}-{figure.name}", figure.title, words)
            rows.setdefault(figure.name, []).append(
                Chart(file, figure.title, figure.note, machine.label, drawn, png)
            )
            tick()
    alike = all(set(names) <= grid.keys() for grid in found)
    title = (
        name
        if name != OVERALL
        else f"Mean of {listed(names)}"
        if alike
        else "Mean over each machine's sets"
    )
    strips = [strip(machine, grid) for machine, grid in held]
    tables = [cells.all_cells(grid, f"{name}, {machine.label}") for machine, grid in held]
    return Panel(name, title, list(rows.values()), strips, tables)


def strip(machine: Machine, grid: Grid) -> dict[str, Any]:
    """The winner of each concurrency; who is level with it."""
    tiles = []
    for concurrency in grid.concurrencies:
        best, *rivals = grid.level(concurrency)
        gain = grid.speed_up(best) if best.method != "none" else None
        tiles.append(
            {
                "concurrency": concurrency,
                "method": name if (name := best.method.partition(TREE)[0]) in METHODS else "other",
                "name": method_label(best.method),
                "k": "" if best.method == "none" else f"K={best.k}",
                "gain": times(gain.value) if gain else "1×" if best.method == "none" else "–",
                "speed": amount(best.throughput),
                "level": listed([label(rival) for rival in rivals]),
            }
        )
    return {"machine": machine.label, "tiles": tiles}


def told(machine: Machine, found: dict[str, Grid]) -> dict[str, Any]:
    """A machine's sentence and its few facts."""
    grid = next(iter(found.values()))
    gains = [(r.value, c) for c in grid.measured if c.method != "none" and (r := grid.speed_up(c))]
    facts = []
    if gains:
        gain, cell = max(gains, key=lambda pair: pair[0])
        what = "largest speed-up over none" if gain > 1 else "best speculative speed against none"
        facts.append((times(gain), what, f"{label(cell)}, {cell.concurrency} at a time"))
    if grid.measured:
        cell = max(grid.measured, key=lambda cell: cell.throughput or 0)
        facts.append(
            (
                amount(cell.throughput),
                "tokens/s at most",
                f"{label(cell)}, {cell.concurrency} at a time",
            )
        )
    compared, identical, failed, requests = counts(machine)
    if compared:
        rate = "100%" if identical == compared else share(min(identical / compared, 0.999))
        facts.append((rate, "answers identical to none's", f"{identical:,} of {compared:,}"))
    if requests:
        facts.append((f"{failed:,}", "failed requests", f"of {requests:,}"))
    name = next(iter(found))
    return {
        "machine": machine.label,
        "sentence": verdict(grid),
        "more": against_eagle3(grid),
        "caveat": caveat(machine),
        "facts": facts,
        "over": "geometric mean over sets" if name == OVERALL else name,
    }


def caveat(machine: Machine) -> str:
    """What would make the numbers mean less than they seem to."""
    drafters = {name: d for run in machine.runs for name, d in run.section("drafters").items()}
    noise = [
        method_label(name)
        for name, d in drafters.items()
        if cells.mapping(d).get("trained") is False
    ]
    told = [f"The drafter of {listed(noise)} is untrained: its drafts are noise."] if noise else []
    _, _, failed, requests = counts(machine)
    if failed:
        told.append(f"{failed:,} of {requests:,} requests failed: see below.")
    return " ".join(told)


def counts(machine: Machine) -> tuple[int, int, int, int]:
    tables = [cells.mapping(cell.raw.get("check")) for cell in machine.cells]
    compared, identical = (
        sum(int(cells.number(t.get(name)) or 0) for t in tables)
        for name in ("compared", "identical")
    )
    failed, requests = (
        sum(cell.count(name) for cell in machine.cells) for name in ("failed", "requests")
    )
    return compared, identical, failed, requests


def facts(run: ResultRun) -> dict[str, dict[str, str]]:
    """How a run was measured, as text."""
    said = {"run": run.name, "created": run.raw.get("created"), "command": run.raw.get("command")}
    said |= {name: run.raw.get(name) for name in ("engine", "endpoint")}
    parts = {"run": said, "target": run.target, "drafters": run.section("drafters")}
    parts |= {"environment": run.section("environment"), "settings": run.section("settings")}
    return {
        name: {str(key): shown(value) for key, value in part.items() if value is not None}
        for name, part in parts.items()
        if part
    }


def shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {shown(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(shown, value))
    return str(value)


def write(
    machines: list[Machine], path: Path, tick: Callable[[], None] = lambda: None
) -> list[Path]:
    """The page at `path`, pictures beside it; each appears whole."""
    page, pictures = build(machines, tick)
    contents = {path.name: page.encode("utf-8", "replace")} | pictures
    for name, content in contents.items():
        write_bytes(path.with_name(name), content)
    return [path.with_name(name) for name in contents]
