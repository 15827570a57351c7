from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn

from peagle.cli.application import app, err, warn
from peagle.errors import UserError

Results = Annotated[
    Path,
    typer.Argument(metavar="DIR", help="Where `peagle bench --out` wrote; or one result file."),
]
PageFile = Annotated[
    Path | None,
    typer.Option("--out", help="The page. Default: DIR/report.html.", show_default=False),
]
AsMarkdown = Annotated[
    bool, typer.Option("--markdown", help="Print a Markdown table; write nothing.")
]
OnlySet = Annotated[
    str | None,
    typer.Option("--set", help="With --markdown: this set, not the mean.", show_default=False),
]


@app.command()
def report(
    folder: Results,
    page_path: PageFile = None,
    as_markdown: AsMarkdown = False,
    only_set: OnlySet = None,
) -> None:
    """Make one HTML page (and PNGs beside it) of benchmark results: the fastest method and its K.

    Example: peagle report results/ --out report.html
    """
    from peagle.report.grid import set_names
    from peagle.report.machines import group_by_machine
    from peagle.results.run_folder import read_results

    machines = group_by_machine(read_results(folder, warn))
    names = set_names(cell for machine in machines for cell in machine.cells)
    if only_set is not None and only_set not in names:
        raise UserError(f"no set {only_set!r} in these results: use one of {', '.join(names)}")
    if as_markdown:
        from peagle.report.markdown import markdown

        print(markdown(machines, only_set))
        return
    if only_set is not None:
        raise UserError("--set goes with --markdown: the page shows every set")
    from peagle.report.page import write_page

    path = page_path or (folder if folder.is_dir() else folder.parent) / "report.html"
    if path.is_dir():
        raise UserError(f"{path} is a folder: give a file, such as {path / 'report.html'}")
    columns = (SpinnerColumn(), TextColumn("drawing charts: {task.completed}"))
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("")
        page, *pictures = write_page(machines, path, lambda: bar.advance(task))
    print(page)
    err.print(f"and {len(pictures)} PNGs beside it", highlight=False)
