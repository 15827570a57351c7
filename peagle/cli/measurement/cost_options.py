"""The options of `peagle cost`."""

from pathlib import Path
from typing import Annotated

import typer

Price = Annotated[
    float, typer.Option("--price", help="What an hour of one GPU costs, in any currency.")
]
Results = Annotated[
    Path | None,
    typer.Argument(metavar="[DIR]", help="What `peagle bench --out` wrote; or one result file."),
]
Gpus = Annotated[int, typer.Option("--gpus", help="GPUs of the replica that was measured.")]
Busy = Annotated[float, typer.Option("--busy", help="The share of an hour in which it is loaded.")]
MaxTpot = Annotated[
    float | None,
    typer.Option("--tpot-ms", help="No user may wait longer for a token.", show_default=False),
]
Load = Annotated[
    float | None, typer.Option("--load", help="Tokens per second to serve.", show_default=False)
]
Users = Annotated[int | None, typer.Option("--users", help="Users at a time.", show_default=False)]
Acceptance = Annotated[
    float | None,
    typer.Option(
        "--acceptance", help="What if the acceptance length were this?", show_default=False
    ),
]
DraftLength = Annotated[
    int | None, typer.Option("-k", "--k", help="What if K were this?", show_default=False)
]
WhatIfMethod = Annotated[
    str, typer.Option("--method", help="The method that --acceptance or -k is for.")
]
StepMs = Annotated[
    float | None,
    typer.Option("--step-ms", help="By hand: milliseconds of a step.", show_default=False),
]
Speed = Annotated[
    float | None,
    typer.Option("--tokens-per-second", help="By hand: of all users.", show_default=False),
]
Concurrency = Annotated[int, typer.Option("--concurrency", help="By hand: users at a time.")]
EveryK = Annotated[bool, typer.Option("--all", help="Every K, not only the cheapest.")]
PlotFile = Annotated[
    Path | None,
    typer.Option("--plot", help="Draw cost against a user's speed: a PNG.", show_default=False),
]
