"""A spinner with the current status, on stderr."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from peagle.cli.application import err


@contextmanager
def spinner(quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a line of status; outside of a terminal it does nothing."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    disable = quiet or not err.is_terminal
    with Progress(*columns, console=err, transient=True, disable=disable) as progress:
        task = progress.add_task("")
        yield lambda line: progress.update(task, description=escape(line))
