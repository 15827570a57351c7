from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn

from peagle.cli.application import app, err, warn
from peagle.errors import UserError


@app.command()
def report(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Where `peagle bench --out` wrote; or one result file."),
    ],
    to: Annotated[
        Path | None,
        typer.Option("--out", help="The page. Default: DIR/report.html.", show_default=False),
    ] = None,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print a Markdown table; write nothing.")
    ] = False,
    only: Annotated[
        str | None,
        typer.Option("--set", help="With --markdown: this set, not the mean.", show_default=False),
    ] = None,
) -> None:
    """Make one HTML page (and PNGs beside it) of benchmark results: who is fastest, by how much, with which K.

    Example: peagle report results/ --out report.html
    """
    from peagle.report.grid import sets_of
    from peagle.report.machines import machines
    from peagle.results.runs import read_runs

    found = machines(read_runs(folder, warn))
    names = sets_of(cell for machine in found for cell in machine.cells)
    if only is not None and only not in names:
        raise UserError(f"no set {only!r} in these results: use one of {', '.join(names)}")
    if as_markdown:
        from peagle.report.markdown import markdown

        print(markdown(found, only))
        return
    if only is not None:
        raise UserError("--set goes with --markdown: the page shows every set")
    from peagle.report.page import write

    path = to or (folder if folder.is_dir() else folder.parent) / "report.html"
    if path.is_dir():
        raise UserError(f"{path} is a folder: give a file, such as {path / 'report.html'}")
    columns = (SpinnerColumn(), TextColumn("drawing charts: {task.completed}"))
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("")
        made = write(found, path, lambda: bar.advance(task))
    print(made[0])
    err.print(f"and {len(made) - 1} PNGs beside it", highlight=False)
