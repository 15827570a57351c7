"""Options that several commands of this room have."""

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_SETS = "humaneval,mt_bench,gsm8k"

SetNames = Annotated[
    str, typer.Option("--set", help="Names, or JSONL files with `turns`, separated by commas.")
]
DataFolder = Annotated[
    Path | None,
    typer.Option(
        "--data",
        help="The folder with NAME.jsonl (or .jsonl.gz)."
        " Default: PEAGLE_DATA, else data in PEAGLE_HOME.",
        show_default=False,
    ),
]
Drafters = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        help="Folders of drafters to use instead of the pair's, separated by commas.",
        show_default=False,
    ),
]
TaskLimit = Annotated[
    int | None,
    typer.Option("--limit", help="Only the first N tasks of each set.", show_default=False),
]
UserCounts = Annotated[str, typer.Option("--concurrency", help="Users at a time.")]
OutFile = Annotated[
    Path | None,
    typer.Option("--out", help="Write the JSON to this file as well.", show_default=False),
]
OnlySet = Annotated[
    str | None,
    typer.Option("--set", help="This set. Default: the mean of all.", show_default=False),
]
