"""Options with the same meaning in every command."""

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Method = Annotated[
    str | None,
    typer.Option(
        "--method", help="none, ngram, eagle3 or p-eagle. Default: the pair's.", show_default=False
    ),
]
K = Annotated[
    int | None,
    typer.Option(
        "-k",
        "--k",
        help="Number of tokens to draft. Default: the pair's; generate and demo on a CPU: auto.",
        show_default=False,
    ),
]
Tree = Annotated[
    int, typer.Option("--tree", help="Draft trees with this many nodes and depth K; 0: chains.")
]
Ngram = Annotated[
    bool | None,
    typer.Option(
        "--ngram/--no-ngram",
        help="N-gram drafts beside the drafter's, where text repeats itself."
        " Default: on a CPU, with adaptive drafting of chains.",
        show_default=False,
    ),
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", help="Maximum length of the answer.")]
Drafter = Annotated[
    Path | None,
    typer.Option(
        "--drafter", help="Folder of a drafter that replaces the pair's.", show_default=False
    ),
]
Target = Annotated[
    str | None,
    typer.Option(
        "--target",
        help="A target: a folder, a .gguf file, a pair's name or a hub id.",
        show_default=False,
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        "--context",
        help="Maximum number of tokens of a prompt and its answer. Default: the target's.",
        show_default=False,
    ),
]
DrafterWindow = Annotated[
    int | None,
    typer.Option(
        "--drafter-window",
        help="Positions that a row of the drafter attends to; 0: all. Default: the drafter's.",
        show_default=False,
    ),
]
Exact = Annotated[
    bool | None,
    typer.Option(
        "--exact/--no-exact",
        help="Answers bit-equal to those of a request alone without drafts, even at near ties."
        " Default: on below float32, where it is supported and costs little.",
        show_default=False,
    ),
]
Int8 = Annotated[
    bool,
    typer.Option(
        "--int8",
        help="Matrices in 8 bits, on a CPU: faster, but the target's answers may differ.",
    ),
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        help="float32, bfloat16, float16, or auto: the one measured to be fastest here.",
    ),
]
