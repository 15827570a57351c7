import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peagle.catalog import find
from peagle.cli.application import app, out, warn
from peagle.cli.options import Json, K, Target
from peagle.cli.options import Method as MethodOption
from peagle.core import Method, check_k, parse_method
from peagle.errors import UserError
from peagle.paths import checkpoint_folder

if TYPE_CHECKING:
    from peagle.loaded import LoadedPair


@app.command()
def export(
    drafter: Annotated[
        str, typer.Argument(help="A drafter's folder, or a pair's name for the one it uses.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the checkpoint is written.")],
    to: Annotated[str, typer.Option("--to", help="vllm or speculators.")] = "vllm",
    target: Target = None,
    method: MethodOption = None,
    k: K = None,
    dtype: Annotated[
        str,
        typer.Option("--dtype", help="What tensors are stored in: bfloat16, float32 or float16."),
    ] = "bfloat16",
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

    Example: peagle export smollm2-135m exported/ --to vllm
    """
    if to not in ("vllm", "speculators"):
        raise UserError(f"unknown format {to!r}: use --to vllm or --to speculators")
    check_k(1 if k is None else k)
    from peagle.export.export import export as write
    from peagle.export.export import vllm_command
    from peagle.export.vllm_subset import left_out_parts, notice
    from peagle.target.precision import choose_dtype

    checkpoint_folder(folder)  # refused before anything is loaded
    stored_as = choose_dtype(dtype, "cpu")
    loaded, name = load_for(drafter, target, method)
    made = loaded.drafter(name)
    k = k or loaded.pair.k
    name_or_path = verifier or served_name(loaded)
    served = {"name_or_path": name_or_path, "architectures": architectures(loaded)}
    write(made, folder, to, k, served, stored_as)  # type: ignore[arg-type]
    command = vllm_command(folder.resolve(), to, made, k, name_or_path)  # type: ignore[arg-type]
    if as_json:
        answer = {
            "folder": str(folder),
            "format": to,
            "method": name,
            "k": k,
            "trained": made.config.trained,
        }
        print(json.dumps(answer | {"left_out": left_out_parts(made.config), "command": command}))
        return
    if lost := notice(made.config):
        warn(lost)
    print(f"{folder}: {name} drafter in {to} format, drafts identical after reloading")
    if not made.config.trained:
        out.print("[yellow]this drafter is untrained: its drafts are noise[/]")
    print(f"serve it: {command}")
    if to == "speculators" and Path(name_or_path).is_absolute():
        print("it names its target by a path of this machine: --verifier gives it another name")


def load_for(drafter: str, target: str | None, method: str | None) -> "tuple[LoadedPair, Method]":
    """The drafter with its target in float32, so that nothing is rounded twice."""
    from peagle.drafter.formats.checkpoint import read
    from peagle.loaded import load

    folder = Path(drafter).expanduser()
    if not folder.is_dir():
        pair = find(drafter)
        wanted = parse_method(method or pair.method)
        if wanted == "none":
            raise UserError(
                f"none has no drafter to export: use --method {' or '.join(pair.drafters)}"
            )
        pair.drafter(wanted)
        return load(pair, target=target, dtype="float32", device="cpu"), wanted
    config = read(folder).config
    if method and parse_method(method) != config.method:
        raise UserError(f"{drafter} holds a {config.method} drafter, not {method}: drop --method")
    made_for = target or config.target
    if made_for is None:
        raise UserError(f"{drafter} does not say which target it was made for: give --target")
    return load(find(made_for), drafter=folder, dtype="float32", device="cpu"), config.method


def served_name(loaded: "LoadedPair") -> str:
    """What vLLM can find the target by: its hub id if it came from there, else the folder it was loaded from."""
    from peagle.pull import receipt

    folder = loaded.target.folder
    assert folder is not None
    return str(loaded.target.name if (receipt(folder) or {}).get("source") == "hub" else folder)


def architectures(loaded: "LoadedPair") -> list[str]:
    return loaded.target.model.config.architectures or [type(loaded.target.model).__name__]
