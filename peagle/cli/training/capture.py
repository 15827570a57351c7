import json
from pathlib import Path
from typing import Annotated

import typer

from peagle.catalog import DEFAULT_PAIR
from peagle.cli.application import app, err, warn
from peagle.cli.options import Device, Dtype, Json
from peagle.cli.training.regenerate import progress_bar
from peagle.errors import UserError


@app.command()
def capture(
    data: Annotated[
        str,
        typer.Option("--data", help="Folders of `peagle regenerate`, or JSONL files; with commas."),
    ],
    folder: Annotated[
        Path, typer.Option("--out", help="Where the shards go; run again to go on.", metavar="DIR")
    ],
    target: Annotated[
        str, typer.Option("--target", help="A target: a pair's name or a folder.")
    ] = DEFAULT_PAIR,
    top_k: Annotated[
        int, typer.Option("--top-k", help="So many of the teacher's likeliest tokens.")
    ] = 64,
    aux_layers: Annotated[
        str,
        typer.Option(
            "--aux-layers", help="Taps, with commas. Default: 2, L // 2, L - 3.", show_default=False
        ),
    ] = "",
    max_length: Annotated[
        int, typer.Option("--max-length", help="Longer documents are cut.")
    ] = 2048,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Store what training reads of the target (optional): then `peagle train --set data=DIR` runs without it.

    Features are kept in bfloat16, the teacher's likeliest tokens in float16. It says first how much it will write.
    Example: peagle capture --data answers/ --out captured/
    """
    from peagle.loaded import load
    from peagle.train.data.documents import read_documents
    from peagle.train.features.capture import Capture, CaptureSettings

    taps = parse_layers(aux_layers)
    if max_length < 3:
        raise UserError(f"--max-length is {max_length}: use 3 or more")
    loaded = load(target, device=device, dtype=dtype).target
    length = min(max_length, loaded.context)
    documents = read_documents(
        [Path(part.strip()) for part in data.split(",")], loaded, length, warn
    )
    job = Capture(loaded, documents, folder, CaptureSettings(top_k, taps, length))
    told = {
        "out": str(folder),
        "documents": len(documents),
        "tokens": len(documents.ids),
        "kept_shards": len(job.parts) - len(job.missing),
        "shards": len(job.parts),
        "gigabytes": round(job.size / 1e9, 3),
        "free_gigabytes": round(job.free_bytes() / 1e9, 3),
    }
    err.print(summary(told), highlight=False, soft_wrap=True)
    with progress_bar("tokens", as_json) as progress:
        job.run(progress)
    print(json.dumps(told) if as_json else folder)


def parse_layers(words: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in words.split(",") if word.strip())
    except ValueError as error:
        raise UserError(
            f"cannot read --aux-layers {words!r}: write numbers with commas, such as 2,15,27"
        ) from error


def summary(told: dict) -> str:
    kept = (
        f", {told['kept_shards']} of {told['shards']} shards are there already"
        if told["kept_shards"]
        else ""
    )
    return (
        f"{told['documents']:,} documents, {told['tokens']:,} tokens: {told['gigabytes']:.2f} GB to write,"
        f" {told['free_gigabytes']:.2f} GB free{kept}"
    )
