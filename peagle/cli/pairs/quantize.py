import json
from pathlib import Path
from typing import Annotated

import typer

from peagle.catalog import DEFAULT_PAIR, find
from peagle.cli.application import app, err
from peagle.cli.options import Json


@app.command()
def quantize(
    target: Annotated[
        str, typer.Argument(help="A target: a folder, a pair's name or a hub id.")
    ] = DEFAULT_PAIR,
    to: Annotated[str, typer.Option("--format", help="fp8, int8 or int4.")] = "int8",
    group: Annotated[
        int | None,
        typer.Option(
            "--group",
            help="int4: inputs that share a scale: 32, 64 or 128. Default: the largest that fits.",
            show_default=False,
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--out", help="Where it is written. Default: NAME-FORMAT, here.", show_default=False
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the target in fewer bits, as vLLM serves it and every command here takes it with --target.

    Example: peagle quantize smollm2-135m --format int4 --out smollm2-135m-int4
    """
    from peagle.progress import shown
    from peagle.pull import pull
    from peagle.target.quantized.formats import find_format
    from peagle.target.quantized.write import quantize as write

    chosen, pair = find_format(to), find(target)
    folder = folder or Path(f"{Path(pair.name).name}-{to}")
    with shown(err, quiet=as_json) as progress:
        source = pull(pair, progress=progress)
        written = write(source, folder, chosen, progress, group)
    if as_json:
        print(json.dumps({"folder": str(folder)} | written.as_dict()))
        return
    print(
        f"{folder}: {to}, {written.bytes_before:,} -> {written.bytes_after:,} bytes, {written.error:.2%} off"
        f" (the worst matrix {written.errors[written.worst]:.2%}: {written.worst})"
    )
    print(f"serve it: vllm serve {folder.resolve()}")
