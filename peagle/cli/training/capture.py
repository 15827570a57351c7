import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from peagle.catalog import DEFAULT_PAIR
from peagle.cli.application import app, err, warn
from peagle.cli.options import Context, Device, Dtype, Json
from peagle.cli.training.regenerate import progress_bar
from peagle.errors import UserError


@dataclass(frozen=True, slots=True)
class CaptureSummary:
    """The output of `peagle capture --json`."""

    out: str
    documents: int
    tokens: int
    kept_shards: int
    shards: int
    gigabytes: float
    free_gigabytes: float

    def text(self) -> str:
        kept = ""
        if self.kept_shards:
            kept = f", {self.kept_shards} of {self.shards} shards are there already"
        return (
            f"{self.documents:,} documents, {self.tokens:,} tokens:"
            f" {self.gigabytes:.2f} GB to write, {self.free_gigabytes:.2f} GB free{kept}"
        )


@app.command()
def capture(
    data: Annotated[
        str,
        typer.Option(
            "--data", help="Folders of `peagle regenerate`, or JSONL files; separated by commas."
        ),
    ],
    folder: Annotated[
        Path,
        typer.Option("--out", help="Folder of the shards; run again to resume.", metavar="DIR"),
    ],
    target: Annotated[
        str, typer.Option("--target", help="A target: a pair's name or a folder.")
    ] = DEFAULT_PAIR,
    top_k: Annotated[
        int, typer.Option("--top-k", help="Number of the teacher's most likely tokens to keep.")
    ] = 64,
    aux_layers: Annotated[
        str,
        typer.Option(
            "--aux-layers",
            help="Tapped layers, separated by commas. Default: 2, L // 2, L - 3.",
            show_default=False,
        ),
    ] = "",
    max_length: Annotated[
        int, typer.Option("--max-length", help="Tokens of a document; longer ones are cut.")
    ] = 2048,
    context: Context = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Store what training reads of the target (optional): `peagle train --set data=DIR` then
    needs no target.

    Features are stored in bfloat16, the teacher's most likely tokens in float16. The size is
    printed first. Example: peagle capture --data answers/ --out captured/
    """
    from peagle.loaded import load
    from peagle.train.data.documents import read_documents
    from peagle.train.features.capture import Capture
    from peagle.train.features.shard_writer import CaptureSettings

    taps = parse_layers(aux_layers)
    if max_length < 3:
        raise UserError(f"--max-length is {max_length}: use 3 or more")
    loaded = load(target, device=device, dtype=dtype, context=context, stored=False).target
    length = min(max_length, loaded.context)
    documents = read_documents([Path(x.strip()) for x in data.split(",")], loaded, length, warn)
    job = Capture(loaded, documents, folder, CaptureSettings(top_k, taps, length))
    summary = CaptureSummary(
        out=str(folder),
        documents=len(documents),
        tokens=len(documents.ids),
        kept_shards=len(job.parts) - len(job.missing),
        shards=len(job.parts),
        gigabytes=round(job.size / 1e9, 3),
        free_gigabytes=round(job.free_bytes() / 1e9, 3),
    )
    err.print(summary.text(), highlight=False, soft_wrap=True)
    with progress_bar("tokens", as_json) as progress:
        job.run(progress)
    print(json.dumps(asdict(summary)) if as_json else folder)


def parse_layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(",") if word.strip())
    except ValueError as error:
        raise UserError(
            f"cannot read --aux-layers {text!r}: write numbers with commas, such as 2,15,27"
        ) from error
