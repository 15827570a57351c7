from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peagle.cli.application import app
from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.learn.folder import LearnFolder

learn_app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")
app.add_typer(learn_app, name="learn")

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of serve --learn.")]


@learn_app.callback()
def main() -> None:
    """A drafter that learns from its own traffic: what `peagle serve --learn DIR` has learned."""


def open_folder(path: Path) -> "LearnFolder":
    """An existing learn folder."""
    from peagle.learn.folder import LearnFolder

    folder = LearnFolder(path)
    if folder.read_identity() is None:
        raise UserError(
            f"{path} is not a folder of `peagle serve --learn` or `peagle learn from-log`"
        )
    return folder
