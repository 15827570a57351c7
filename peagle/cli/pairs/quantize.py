import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peagle.catalog import DEFAULT_PAIR, find_pair
from peagle.cli.application import app, err
from peagle.cli.options import Json
from peagle.errors import UserError

if TYPE_CHECKING:
    from peagle.target.quantized.write import QuantizationReport


@app.command()
def quantize(
    target: Annotated[
        str, typer.Argument(help="A target: a folder, a pair's name or a hub id.")
    ] = DEFAULT_PAIR,
    to: Annotated[
        str, typer.Option("--format", help="fp8, int8, int4, or mxfp4 for GPT-OSS.")
    ] = "int8",
    group: Annotated[
        int | None,
        typer.Option(
            "--group",
            help="int4: number of inputs that share a scale, 32, 64 or 128."
            " Default: the largest that fits.",
            show_default=False,
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--out", help="Folder to write. Default: NAME-FORMAT, here.", show_default=False
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Quantize a target for vLLM and for the option --target of all commands.

    Example: peagle quantize smollm2-135m --format int4 --out smollm2-135m-int4
    """
    from peagle.progress import progress_bars
    from peagle.pull import pull

    write = choose_writer(to, group)
    pair = find_pair(target)
    folder = folder or Path(f"{Path(pair.name).name}-{to}")
    with progress_bars(err, quiet=as_json) as progress:
        source = pull(pair, progress=progress)
        if source.is_file():
            raise UserError(f"{source} is quantized already: give a folder with safetensors")
        result = write(source, folder, progress=progress)
    if as_json:
        print(json.dumps({"folder": str(folder)} | result.as_dict()))
        return
    print(
        f"{folder}: {to}, {result.bytes_before:,} -> {result.bytes_after:,} bytes,"
        f" error {result.error:.2%} (the worst matrix {result.errors[result.worst]:.2%}:"
        f" {result.worst})"
    )
    print(f"serve it: vllm serve {folder.resolve()}")


def choose_writer(format: str, group: int | None) -> "Callable[..., QuantizationReport]":
    """The function that writes this format, of source, output folder and progress."""
    from peagle.target.experts.mxfp4_layout import MXFP4
    from peagle.target.experts.mxfp4_write import write_mxfp4
    from peagle.target.quantized.formats import find_format
    from peagle.target.quantized.write import quantize as write

    if format != MXFP4:
        return partial(write, format=find_format(format), group=group)
    if group is not None:
        raise UserError("--group is for int4: leave it out")
    return write_mxfp4
