"""peagle demo."""

import json
from typing import Annotated

import typer

from peagle.catalog import DEFAULT_PAIR
from peagle.cli.application import app, err, out
from peagle.cli.options import Device, Dtype, Exact, Json, K, MaxTokens
from peagle.errors import UserError


@app.command()
def demo(
    pair: Annotated[str, typer.Argument(help="The pair.")] = DEFAULT_PAIR,
    k: K = None,
    max_tokens: MaxTokens = 96,
    exact: Exact = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Decode three real prompts with every method of a pair, side by side, and compare.

    Example: peagle demo smollm2-135m --max-tokens 64
    """
    if max_tokens < 2:
        raise UserError("a speed needs at least two tokens: use --max-tokens 2 or more")
    from peagle.evaluate.demo import run_demo, show_demo
    from peagle.loaded import load
    from peagle.progress import progress_bars

    with progress_bars(err, quiet=as_json) as progress:
        loaded = load(pair, device=device, dtype=dtype, progress=progress)
    rows = run_demo(loaded, k, max_tokens, exact, err)
    if as_json:
        print(json.dumps([row.as_dict() for row in rows], ensure_ascii=False))
    else:
        show_demo(rows, loaded, out)
