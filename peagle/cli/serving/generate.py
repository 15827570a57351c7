import json
import sys
from typing import Annotated

import typer

from peagle.catalog import DEFAULT_PAIR, pair_names
from peagle.cli.application import app, err
from peagle.cli.options import (
    Device,
    Drafter,
    Dtype,
    Exact,
    Int8,
    Json,
    K,
    MaxTokens,
    Method,
    Target,
    Tree,
)
from peagle.core import Sampling, check_k, parse_method
from peagle.draft_shape import check_tree_nodes
from peagle.errors import UserError


@app.command()
def generate(
    words: Annotated[
        list[str],
        typer.Argument(metavar="[PAIR] PROMPT", help="A pair, and the prompt (- reads stdin)."),
    ],
    method: Method = None,
    k: K = None,
    tree: Tree = 0,
    max_tokens: MaxTokens = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens up to this mass.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Keep this many tokens; 0: all.")] = 0,
    min_p: Annotated[
        float, typer.Option(help="Drop tokens below this share of the likeliest.")
    ] = 0.0,
    seed: Annotated[
        int | None, typer.Option(help="The same seed gives the same answer.", show_default=False)
    ] = None,
    exact: Exact = None,
    int8: Int8 = False,
    raw: Annotated[bool, typer.Option("--raw", help="Without the chat template.")] = False,
    target: Target = None,
    drafter: Drafter = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Answer one prompt, and tell how many drafts were accepted on the way.

    Example: peagle generate smollm2-135m "Write a haiku about rain." --method p-eagle -k 7 --json
    """
    pair, prompt = pair_and_prompt(words)
    Sampling(temperature, top_p, top_k, min_p, seed)  # refused before anything is loaded
    check_k(1 if k is None else k)
    parse_method(method or "none")
    check_tree_nodes(tree, () if k is None else (k,), method, exact)
    from peagle.loaded import load
    from peagle.progress import progress_bars

    with progress_bars(err, quiet=as_json) as progress:
        loaded = load(
            pair, target=target, drafter=drafter, device=device, dtype=dtype, progress=progress
        )
    answer = loaded.generate(
        prompt,
        k=k,
        tree=tree,
        method=method,
        max_tokens=max_tokens,
        raw=raw,
        exact=exact,
        int8=int8,
        on_text=None if as_json else lambda text: print(text, end="", flush=True),
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
    )
    if as_json:
        print(json.dumps(answer.as_dict(), ensure_ascii=False))
        return
    print()
    err.print(
        f"[dim]{answer.method} {answer.shape_text}: {len(answer.token_ids)} tokens in {len(answer.steps)} steps,"
        f" acceptance length {answer.acceptance_length:.2f}, {answer.tokens_per_second:.1f} tokens/s,"
        f" {answer.weights}{', exact' if answer.exact else ''}, finished by {answer.finish_reason}[/]",
        highlight=False,
        soft_wrap=True,
    )
    if not answer.trained:
        err.print(
            f"[yellow]the {answer.method} drafter of this pair is untrained: its drafts are noise[/]"
        )


def pair_and_prompt(words: list[str]) -> tuple[str, str]:
    if len(words) > 2:
        raise UserError("give a pair and one prompt: put the prompt in quotes")
    if len(words) == 1 and words[0] in pair_names():
        raise UserError(f"{words[0]!r} is a pair: add a prompt in quotes")
    pair, prompt = words if len(words) == 2 else (DEFAULT_PAIR, words[0])
    prompt = sys.stdin.read() if prompt == "-" else prompt
    if not prompt.strip():
        raise UserError("the prompt is empty")
    if any("\ud800" <= letter <= "\udfff" for letter in prompt):
        raise UserError("the prompt is not valid UTF-8: convert it first")
    return pair, prompt
