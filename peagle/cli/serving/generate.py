"""peagle generate."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peagle.catalog import DEFAULT_PAIR, pair_names
from peagle.catalog.catalog import is_gguf_file, is_gguf_name
from peagle.cli.application import app, err
from peagle.cli.load_pair import load_with_progress
from peagle.cli.options import (
    Context,
    Device,
    Drafter,
    Dtype,
    Exact,
    Int8,
    Json,
    K,
    MaxTokens,
    Method,
    Ngram,
    Target,
    Tree,
)
from peagle.core import Generation, Sampling, check_k, parse_method
from peagle.draft_shape import check_tree_nodes
from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.target.precision import SpeedChoice

Words = Annotated[
    list[str],
    typer.Argument(metavar="[PAIR] PROMPT", help="A pair, and the prompt (- reads stdin)."),
]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens up to this probability.")]
TopK = Annotated[int, typer.Option(help="Keep this many tokens; 0: all.")]
MinP = Annotated[float, typer.Option(help="Drop tokens below this fraction of the likeliest.")]
Seed = Annotated[
    int | None, typer.Option(help="The same seed gives the same answer.", show_default=False)
]
Raw = Annotated[bool, typer.Option("--raw", help="Do not apply the chat template.")]


@app.command()
def generate(
    words: Words,
    method: Method = None,
    k: K = None,
    tree: Tree = 0,
    ngram: Ngram = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    seed: Seed = None,
    exact: Exact = None,
    int8: Int8 = False,
    raw: Raw = False,
    target: Target = None,
    drafter: Drafter = None,
    context: Context = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Answer one prompt, and report how many drafts were accepted.

    Example: peagle generate smollm2-135m "Write a haiku about rain." --method p-eagle -k 7 --json
    """
    pair, prompt = pair_and_prompt(words)
    sampling = Sampling(temperature, top_p, top_k, min_p, seed)  # Checked before loading.
    check_drafting(method, k, tree)
    loaded = load_with_progress(pair, target, drafter, device, dtype, context, quiet=as_json)
    answer = loaded.generate(
        prompt,
        k=k,
        tree=tree,
        ngram=ngram,
        method=method,
        max_tokens=max_tokens,
        raw=raw,
        exact=exact,
        int8=int8,
        on_text=None if as_json else print_text,
        **asdict(sampling),
    )
    if as_json:
        fields = answer.as_dict() | {"startup": loaded.startup.as_dict()}
        print(json.dumps(fields, ensure_ascii=False))
    else:
        print_statistics(answer)
        print_choice(loaded.target.speed_choice)


def check_drafting(method: str | None, k: int | None, tree: int) -> None:
    check_k(1 if k is None else k)
    parse_method(method or "none")
    check_tree_nodes(tree, () if k is None else (k,), method)


def print_text(text: str) -> None:
    print(text, end="", flush=True)


def print_statistics(answer: Generation) -> None:
    """End the line of the answer, and print its statistics to stderr."""
    print()
    exact = ", exact" if answer.exact else ""
    drafted = answer.steps_with_drafts
    drafts = f" ({drafted} with drafts)" if 0 < drafted < len(answer.steps) else ""
    err.print(
        f"[dim]{answer.method} {answer.shape_text}:"
        f" {len(answer.token_ids)} tokens in {len(answer.steps)} steps{drafts},"
        f" acceptance length {answer.acceptance_length:.2f},"
        f" {answer.tokens_per_second:.1f} tokens/s,"
        f" {answer.weights}{exact}, finished by {answer.finish_reason}[/]",
        highlight=False,
        soft_wrap=True,
    )
    if not answer.trained:
        err.print(
            f"[yellow]The {answer.method} drafter of this pair is untrained: its drafts are"
            " noise.[/]",
            soft_wrap=True,
        )


def print_choice(choice: "SpeedChoice | None") -> None:
    """Why the weights have their dtype, if that was measured."""
    if choice is not None:
        err.print(f"[dim]measured on this CPU: {choice.text}[/]", highlight=False, soft_wrap=True)


def names_gguf_file(word: str) -> bool:
    """Whether a word on the command line is the path of a GGUF file, possibly a mistyped one."""
    path = Path(os.path.expanduser(word))
    return is_gguf_file(path) or (is_gguf_name(path) and len(word.split()) == 1)


def pair_and_prompt(words: list[str]) -> tuple[str, str]:
    """The pair and the prompt on the command line; the pair may be left out."""
    if len(words) > 2:
        raise UserError("give a pair and one prompt: put the prompt in quotes")
    if len(words) == 1 and words[0] in pair_names():
        raise UserError(f"{words[0]!r} is a pair: add a prompt in quotes")
    if len(words) == 1 and names_gguf_file(words[0]):
        raise UserError(f"{words[0]} is a file, not a prompt: add a prompt in quotes")
    pair, prompt = words if len(words) == 2 else (DEFAULT_PAIR, words[0])
    prompt = sys.stdin.read() if prompt == "-" else prompt
    if not prompt.strip():
        raise UserError("the prompt is empty: write one in quotes")
    if any("\ud800" <= character <= "\udfff" for character in prompt):
        raise UserError("the prompt is not valid UTF-8: convert it first")
    return pair, prompt
