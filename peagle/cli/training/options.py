"""Options that commands for training share."""

from pathlib import Path
from typing import Annotated

import typer

PromptFile = Annotated[
    Path | None,
    typer.Option(
        "--prompts", help="JSONL: `turns` or `prompt`.", metavar="FILE", show_default=False
    ),
]
PromptLimit = Annotated[
    int | None, typer.Option("--limit", help="Number of prompts to answer.", show_default=False)
]
Invent = Annotated[
    int, typer.Option("--invent", help="Number of prompts that the target writes itself.")
]
Long = Annotated[
    int,
    typer.Option(
        "--long",
        help="Join prompts to conversations of up to so many tokens (not --max-prompt); 0: no.",
    ),
]
Validation = Annotated[
    int,
    typer.Option(
        "--validation",
        help="Number of prompts that are held out, by a hash of their text, and never answered:"
        " validation.jsonl is a set for `peagle evaluate`.",
    ),
]
AnswerMinutes = Annotated[
    float | None,
    typer.Option(
        "--answer-minutes",
        help="Minutes of generating answers: training starts with those that are finished.",
        show_default=False,
    ),
]
StopAfter = Annotated[
    float | None,
    typer.Option("--stop-after", help="Minutes; run again to resume.", show_default=False),
]
