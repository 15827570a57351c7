"""One self-contained HTML page, and PNGs beside it. The same results give the same bytes."""

from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from peagle.paths import write_bytes
from peagle.report.cells import check_table, failure_table, score_table
from peagle.report.grid import OVERALL, grids_by_set, set_names
from peagle.report.machines import Machine
from peagle.report.markdown import load_text, markdown
from peagle.report.palette import DARK, LIGHT, css_variables
from peagle.report.panels import PanelBuilder
from peagle.report.summary import summarize
from peagle.report.words import join_words
from peagle.results.run_file import BenchResult


def ignore_chart() -> None:
    pass


def write_page(
    machines: Sequence[Machine], path: Path, on_chart: Callable[[], None] = ignore_chart
) -> list[Path]:
    """Write the page to `path`, pictures beside it; call `on_chart` after every chart."""
    page, pictures = build_page(machines, on_chart)
    contents = {path.name: page.encode("utf-8", "replace")} | pictures
    for name, content in contents.items():
        write_bytes(path.with_name(name), content)
    return [path.with_name(name) for name in contents]


def build_page(
    machines: Sequence[Machine], on_chart: Callable[[], None] = ignore_chart
) -> tuple[str, dict[str, bytes]]:
    """The page, and by file name the pictures of its first panel: the mean, or the only set."""
    names = set_names(cell for machine in machines for cell in machine.cells)
    machine_grids = [(machine, grids_by_set(machine.cells, names)) for machine in machines]
    builder = PanelBuilder(machine_grids, names, on_chart)
    panel_names = [
        name for name in (OVERALL, *names) if any(name in by_set for _, by_set in machine_grids)
    ]
    panels = [builder.build(name, index) for index, name in enumerate(panel_names)]
    pictures = {f"{chart.name}.png": chart.png for row in panels[0].rows for chart in row}
    tables = (check_table(machines), score_table(machines), failure_table(machines))
    info = machines[0].results[0].info
    page = (
        template_environment()
        .get_template("page.html")
        .render(
            title=info.pair_name,
            target=info.target,
            load=load_text(info, join_words(names)),
            summaries=[summarize(machine, by_set) for machine, by_set in machine_grids],
            panels=panels,
            tables=[table for table in tables if table.rows],
            runs=[
                (machine.label, run_facts(result))
                for machine in machines
                for result in machine.results
            ],
            markdown=markdown(machines),
            light=css_variables(LIGHT),
            dark=css_variables(DARK),
        )
    )
    return page, pictures


def template_environment() -> Any:
    """Everything is escaped: result files may hold any text."""
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


def run_facts(result: BenchResult) -> dict[str, dict[str, str]]:
    """How a run was measured, as text, by section."""
    info = result.info
    sections = {
        "run": {
            "run": result.name,
            "created": result.created,
            "command": info.command,
            "engine": info.engine,
            "endpoint": info.endpoint,
            "exact mode": exact_modes(result),
        },
        "target": info.target,
        "drafters": info.drafters,
        "environment": info.environment,
        "settings": info.settings,
    }
    return {
        name: {str(key): plain_text(value) for key, value in section.items() if value is not None}
        for name, section in sections.items()
        if section
    }


def exact_modes(result: BenchResult) -> str | None:
    """The modes in which its cells ran; None where the file does not say."""
    modes = dict.fromkeys(cell.exact_mode for cell in result.cells if cell.exact_mode)
    return ", ".join(modes) or None


def plain_text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {plain_text(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(plain_text, value))
    return str(value)
