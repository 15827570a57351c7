"""The safetensors files with a target's weights: one, or those that its index names."""

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from peagle.errors import UserError

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def shard_paths(folder: Path) -> list[Path]:
    index = folder / INDEX
    names = [SINGLE_FILE]
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise UserError(
                f"{index} is not a valid index ({error!r}): copy the target again"
            ) from error
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise UserError(f"the target in {folder} lacks {missing[0]}: copy it again, as safetensors")
    return [folder / name for name in names]


def read_shard(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as handle:
            return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read ({error}): copy the target again") from error
