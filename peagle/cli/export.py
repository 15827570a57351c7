import json
from pathlib import Path
from typing import Annotated, Any

import typer

from peagle.catalog import find
from peagle.cli import app, out
from peagle.cli.options import Json, K, Method, Target
from peagle.core import Pair, check_k, parse_method
from peagle.errors import UserError


@app.command()
def export(
    drafter: Annotated[str, typer.Argument(help="A drafter's folder, or a pair's name for the one it uses.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the checkpoint is written.")],
    to: Annotated[str, typer.Option("--to", help="vllm or speculators.")] = "vllm",
    target: Target = None,
    method: Method = None,
    k: K = None,
    dtype: Annotated[str, typer.Option("--dtype", help="float32 or bfloat16.")] = "bfloat16",
    verifier: Annotated[
        str | None,
        typer.Option(
            "--verifier",
            help="What a speculators checkpoint calls its target. Default: the hub id if it"
            " came from there, else its folder.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a complete checkpoint that vLLM serves, and prove by reading it back that its drafts are the same.

    Example: peagle export smollm2-135m --to vllm exported/
    """
    if to not in ("vllm", "speculators"):
        raise UserError(f"unknown format {to!r}: use --to vllm or --to speculators")
    from peagle.drafter.export import export as write
    from peagle.drafter.export import vllm_command
    from peagle.precision import choose_dtype

    loaded, name = load_for(drafter, target, method)
    made = loaded.drafter(name)
    k = check_k(k or loaded.pair.k)
    stored_as = choose_dtype(dtype, "cpu")
    served = {"name_or_path": verifier or served_name(loaded), "architectures": architectures(loaded)}
    write(made, folder, to, k, served, stored_as)  # type: ignore[arg-type]
    command = vllm_command(folder, to, made, k, served["name_or_path"])  # type: ignore[arg-type]
    if as_json:
        answer = {"folder": str(folder), "format": to, "method": name, "k": k, "trained": made.config.trained}
        print(json.dumps(answer | {"command": command}))
        return
    out.print(f"{folder}: {name} drafter in {to} format, drafts identical after reloading", highlight=False)
    if not made.config.trained:
        out.print("[yellow]this drafter is untrained: its drafts are noise[/]")
    out.print(f"serve it: {command}", highlight=False, soft_wrap=True)


def load_for(drafter: str, target: str | None, method: str | None) -> tuple[Any, Any]:
    """The drafter with its target in float32, so that nothing is rounded twice."""
    from peagle.drafter.checkpoint import read
    from peagle.loaded import load

    if not Path(drafter).expanduser().is_dir():
        pair = find(drafter)
        loaded = load(pair, target=target_folder_of(target), dtype="float32", device="cpu")
        return loaded, parse_method(method or pair.method)
    config = read(Path(drafter).expanduser()).config
    wanted = target or config.target
    if wanted is None:
        raise UserError(f"{drafter} does not say which target it was made for: give --target")
    loaded = load(pair_of(wanted), drafter=drafter, dtype="float32", device="cpu")
    return loaded, config.method


def pair_of(target: str) -> Pair:
    try:
        return find(target)
    except UserError as error:
        raise UserError(f"target {target!r} is neither a pair, a hub id of one, nor a folder: give --target") from error


def target_folder_of(target: str | None) -> Path | None:
    from peagle.pull import pull

    return pull(pair_of(target)) if target else None


def served_name(loaded: Any) -> str:
    from peagle.pull import pull, receipt

    folder = pull(loaded.pair)
    from_hub = (receipt(folder) or {}).get("source") == "hub"
    return loaded.pair.target.hub if from_hub else str(folder)


def architectures(loaded: Any) -> list[str]:
    return loaded.target.model.config.architectures or [type(loaded.target.model).__name__]
