"""The safetensors files that hold a target's weights: one, or as many as its index names."""

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from peagle.errors import UserError

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"


def shards(folder: Path) -> list[Path]:
    index = folder / INDEX
    try:
        names = (
            sorted(set(json.loads(index.read_text())["weight_map"].values()))
            if index.is_file()
            else [ONE]
        )
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(
            f"{index} cannot be understood ({error!r}): copy the target again"
        ) from error
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise UserError(f"the target in {folder} lacks {missing[0]}: copy it again, as safetensors")
    return [folder / name for name in names]


def read_shard(file: Path) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="pt") as handle:
            return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} cannot be read ({error}): copy the target again") from error
