"""Options that mean the same in every command."""

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Method = Annotated[
    str | None,
    typer.Option(
        "--method", help="none, eagle3 or p-eagle. Default: the pair's.", show_default=False
    ),
]
K = Annotated[
    int | None,
    typer.Option(
        "-k", "--k", help="How many tokens to draft. Default: the pair's.", show_default=False
    ),
]
Tree = Annotated[
    int, typer.Option("--tree", help="Draft trees of so many nodes, K deep; 0: chains.")
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", help="The longest answer.")]
Drafter = Annotated[
    Path | None,
    typer.Option(
        "--drafter", help="A drafter's folder, instead of the pair's.", show_default=False
    ),
]
Target = Annotated[
    str | None,
    typer.Option(
        "--target", help="A target: a folder, a pair's name or a hub id.", show_default=False
    ),
]
Exact = Annotated[
    bool | None,
    typer.Option(
        "--exact/--no-exact",
        help="Bit-equal with and without drafts, even at near ties. Default: where it is needed and can be had.",
        show_default=False,
    ),
]
Int8 = Annotated[
    bool,
    typer.Option(
        "--int8", help="Matrices in 8 bits, on a CPU: faster, but the target's answers may differ."
    ),
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype", help="auto (what is fast here, measured), float32, bfloat16 or float16."
    ),
]
