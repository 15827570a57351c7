"""The options of `peagle bench`."""

from pathlib import Path
from typing import Annotated

import typer

from peagle.catalog import DEFAULT_PAIR
from peagle.cli.measurement.options import DEFAULT_SETS

DEFAULT_KS = "3,5,7,11"

PairName = Annotated[
    str | None, typer.Argument(help=f"The pair. Default: {DEFAULT_PAIR}.", show_default=False)
]
Sets = Annotated[
    str | None,
    typer.Option(
        "--set",
        help="Names (NAME:CATEGORY is a part) or JSONL files, separated by commas."
        f" Default: {DEFAULT_SETS}; none with --profile.",
        show_default=False,
    ),
]
Methods = Annotated[
    str | None,
    typer.Option(
        "--methods",
        help="none, ngram, eagle3, p-eagle. Default: none and all that the pair has.",
        show_default=False,
    ),
]
DraftLengths = Annotated[
    str | None,
    typer.Option(
        "-k",
        "--k",
        help=f"How many tokens to draft: {DEFAULT_KS} or auto.",
        show_default=DEFAULT_KS,
    ),
]
TreeSizes = Annotated[
    str,
    typer.Option(
        "--tree",
        help="Nodes of P-EAGLE's trees: 32, or 0,16,32 (0: chains). With -k auto: the maximum.",
    ),
]
MaxAnswerTokens = Annotated[int, typer.Option("--max-tokens", help="The longest answer.")]
OutFolder = Annotated[Path, typer.Option("--out", help="The folder for NAME.json.")]
RunName = Annotated[
    str | None,
    typer.Option("--name", help="The run's name. Default: pair and date.", show_default=False),
]
Repeats = Annotated[
    int, typer.Option("--repeats", help="Runs of each cell; the medians are reported.")
]
LengthProfile = Annotated[
    str | None,
    typer.Option(
        "--profile",
        help="Answers of given lengths: reasoning, or median=3900,p90=10800,prompt=512,count=64.",
        show_default=False,
    ),
]
WithScores = Annotated[
    bool, typer.Option("--score", help="Also compute humaneval's pass@1 and gsm8k's accuracy.")
]
EndpointUrl = Annotated[
    str | None,
    typer.Option(
        "--endpoint",
        help="Measure an OpenAI-compatible server instead of peagle's engine.",
        show_default=False,
    ),
]
ClientCount = Annotated[
    int,
    typer.Option(
        "--clients", help="Processes that send the load to --endpoint; users are split evenly."
    ),
]
ServedModel = Annotated[
    str | None,
    typer.Option(
        "--model", help="The model's name on the server. Default: the first.", show_default=False
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        help="The server's API key.",
        envvar="OPENAI_API_KEY",
        show_envvar=True,
        show_default=False,
    ),
]
BaselineRun = Annotated[
    str | None,
    typer.Option(
        "--baseline",
        help="Check answers against those of `none` in this run in --out.",
        show_default=False,
    ),
]
Temperature = Annotated[float, typer.Option("--temperature", help="0 is greedy.")]
Seed = Annotated[
    int, typer.Option("--seed", help="The seed of the first task; each next task adds 1.")
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Every answer has --max-tokens tokens.")
]
WarmupTokens = Annotated[
    int, typer.Option("--warmup", help="Tokens that each user requests before a run.")
]
