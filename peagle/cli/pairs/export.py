import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peagle.catalog import find_pair
from peagle.catalog.catalog import is_gguf_file
from peagle.cli.application import app, out, warn
from peagle.cli.options import DrafterWindow, Json, K, Target
from peagle.cli.options import Method as MethodOption
from peagle.core import DRAFTER_METHODS, Method, check_k, parse_method
from peagle.errors import UserError
from peagle.paths import checkpoint_folder

if TYPE_CHECKING:
    import torch

    from peagle.drafter import Drafter
    from peagle.drafter.config import DrafterConfig
    from peagle.drafter.formats.row_format import RowFormat
    from peagle.export.export import ExportFormat
    from peagle.loaded import LoadedPair
    from peagle.target import Target as LoadedTarget


@dataclass(frozen=True, slots=True)
class Exported:
    """A written checkpoint, as it is reported to the user."""

    folder: Path
    format: str
    config: "DrafterConfig"
    k: int
    command: str  # with which vLLM serves it
    target: str  # the name of the target in it


Format = Annotated[
    str,
    typer.Option(
        "--to", help="vllm or speculators; peagle: our own format, which needs the target."
    ),
]
StoredDtype = Annotated[
    str,
    typer.Option("--dtype", help="Type of the stored tensors: bfloat16, float32 or float16."),
]
Verifier = Annotated[
    str | None,
    typer.Option(
        "--verifier",
        help="Name of the target in a speculators checkpoint. Default: the hub id if the"
        " target came from there, else its folder.",
        show_default=False,
    ),
]
Bits = Annotated[
    int | None,
    typer.Option(
        "--bits", help="Bits per weight with --to peagle: 8 (default) or 4.", show_default=False
    ),
]
Group = Annotated[
    int | None,
    typer.Option(
        "--group",
        help="Inputs that share a scale with --bits 4: 16, 32 (default), 64 or 128.",
        show_default=False,
    ),
]
EightBit = Annotated[
    str,
    typer.Option(
        "--eight-bit",
        help="More matrices that keep 8 bits with --bits 4, such as layers.0,dependency;"
        " fc, embeddings and lm_head do.",
    ),
]


@app.command()
def export(
    drafter: Annotated[
        str, typer.Argument(help="Folder of a drafter, or the name of a pair for its drafter.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the new checkpoint.")],
    to: Format = "vllm",
    target: Target = None,
    method: MethodOption = None,
    k: K = None,
    drafter_window: DrafterWindow = None,
    dtype: StoredDtype = "bfloat16",
    verifier: Verifier = None,
    bits: Bits = None,
    group: Group = None,
    eight_bit: EightBit = "",
    as_json: Json = False,
) -> None:
    """Write a complete checkpoint that vLLM serves, and verify that it gives the same drafts.

    With --to peagle, the drafter is stored in our own format with few bits per weight, as trained
    drafters are.

    Example: peagle export smollm2-135m exported/ --to vllm
    """
    check_k(1 if k is None else k)
    export_format = None if to == "peagle" else parse_export_format(to)
    if export_format and (bits is not None or group is not None or eight_bit):
        raise UserError("--bits, --group and --eight-bit are of our own format: add --to peagle")
    rows = parse_row_format(bits, group, eight_bit)
    from peagle.target.precision import choose_dtype

    checkpoint_folder(folder)  # refuse the folder before anything is loaded
    stored_dtype = choose_dtype(dtype, "cpu")
    pair, chosen = load_pair(drafter, target, method)
    model = pair.drafter(chosen)
    if drafter_window is not None:
        model = model.with_window(drafter_window or None)
    if export_format is None:
        write_compact(model, folder, pair.target, stored_dtype, rows, as_json)
        return
    name = verifier or served_name(pair)
    exported = write_export(
        pair, model, folder, export_format, k or pair.pair.k, name, stored_dtype
    )
    print_exported(exported, as_json)


def write_export(
    pair: "LoadedPair",
    model: "Drafter",
    folder: Path,
    export_format: "ExportFormat",
    k: int,
    name: str,
    dtype: "torch.dtype",
) -> Exported:
    """Write a checkpoint that vLLM serves; `name` is that of the target in it."""
    from peagle.drafter.formats.speculators import VerifierConfig
    from peagle.export.export import export as write
    from peagle.export.export import vllm_command

    write(model, folder, export_format, k, VerifierConfig(name, architectures(pair)), dtype)
    command = vllm_command(folder.resolve(), export_format, model, k, name)
    return Exported(folder, export_format, model.config, k, command, name)


def parse_export_format(text: str) -> "ExportFormat":
    if text == "vllm":
        return "vllm"
    if text == "speculators":
        return "speculators"
    raise UserError(f"unknown format {text!r}: use --to vllm, --to speculators or --to peagle")


def parse_row_format(bits: int | None, group: int | None, eight_bit: str) -> "RowFormat":
    from peagle.drafter.formats.row_format import EIGHT_BIT, INT8, RowFormat

    names = tuple(name.strip() for name in eight_bit.split(",") if name.strip())
    if bits != 4 and (group is not None or names):
        raise UserError("--group and --eight-bit are of rows of 4 bits: add --bits 4")
    rows = INT8 if bits is None else RowFormat(bits)
    return replace(rows, group=group or rows.group, eight_bit=EIGHT_BIT + names)


def write_compact(
    model: "Drafter",
    folder: Path,
    target: "LoadedTarget",
    dtype: "torch.dtype",
    rows: "RowFormat",
    as_json: bool,
) -> None:
    """Write our own format and print its size."""
    from peagle.drafter.formats import compact

    compact.save(model, folder, target, dtype, rows)
    size = (folder / "model.safetensors").stat().st_size
    config = model.config
    if as_json:
        content = {
            "folder": str(folder),
            "format": "peagle",
            "method": config.method,
            "trained": config.trained,
            "bits": rows.bits,
            "bytes": size,
        }
        print(json.dumps(content))
        return
    print(f"{folder}: {config.method} drafter in peagle format, {rows.bits} bits, {size:,} bytes")
    print("`peagle evaluate --drafter` measures what rounding costs")


def print_exported(exported: Exported, as_json: bool) -> None:
    from peagle.export.vllm_subset import left_out_parts, subset_notice

    config = exported.config
    if as_json:
        content = {
            "folder": str(exported.folder),
            "format": exported.format,
            "method": config.method,
            "k": exported.k,
            "trained": config.trained,
            "left_out": left_out_parts(config),
            "command": exported.command,
        }
        print(json.dumps(content))
        return
    if notice := subset_notice(config):
        warn(f"{notice}. `peagle evaluate --as-vllm` measures how many")
    print(
        f"{exported.folder}: {config.method} drafter in {exported.format} format,"
        " drafts identical after reloading"
    )
    if not config.trained:
        out.print("[yellow]this drafter is untrained: its drafts are noise[/]")
    print(f"serve it: {exported.command}")
    if exported.format == "speculators" and Path(exported.target).is_absolute():
        print("it names its target by a path of this machine: --verifier gives it another name")


def load_pair(drafter: str, target: str | None, method: str | None) -> "tuple[LoadedPair, Method]":
    """Load the drafter with its target in float32, so that weights are rounded only once."""
    from peagle.drafter.formats.checkpoint import read
    from peagle.loaded import load

    folder = Path(drafter).expanduser()
    if not folder.is_dir():
        pair = find_pair(drafter)
        chosen = parse_method(method or pair.method)
        if chosen not in DRAFTER_METHODS:
            raise UserError(
                f"the method {chosen} has no drafter: use --method {' or '.join(pair.drafters)}"
            )
        pair.drafter(chosen)
        return load(pair, target=target, dtype="float32", device="cpu", stored=False), chosen
    config = read(folder).config
    if method and parse_method(method) != config.method:
        raise UserError(f"{drafter} is a {config.method} drafter, not {method}: drop --method")
    target_name = target or config.target
    if target_name is None:
        raise UserError(f"{drafter} does not name its target: give --target")
    pair = find_pair(target_name)
    return load(pair, drafter=folder, dtype="float32", device="cpu", stored=False), config.method


def served_name(pair: "LoadedPair") -> str:
    """The name by which vLLM finds the target: its hub id if it is from there, else its folder."""
    from peagle.pull import receipt

    name = str(pair.target.name)
    if is_gguf_file(Path(name).expanduser()):
        raise UserError(
            f"vLLM would serve the drafter with {name}, a GGUF file: give `target`, the folder of"
            " the same model with config.json and safetensors, or its name with `verifier`"
        )
    folder = pair.target.folder
    assert folder is not None
    origin = receipt(folder)
    return name if origin and origin.source == "hub" else str(folder)


def architectures(pair: "LoadedPair") -> list[str]:
    return pair.target.model.config.architectures or [type(pair.target.model).__name__]
