"""What `peagle tune` found: the best method and K at each concurrency, for this machine. One file a pair.

PEAGLE_HOME/pairs/NAME.json holds an entry for every machine (GPU or processor, and dtype) it was measured on.
"""

import hashlib
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from peagle.catalog.pair import Best, Pair
from peagle.core import parse_method
from peagle.errors import UserError
from peagle.machine import cpu_name
from peagle.paths import cache_home, write_json

FORMAT = "peagle-tuned/1"


def tuned_path(pair: Pair) -> Path:
    """By the pair's name; a pair that is a folder gets its path's digest beside its name."""
    folder = pair.target.folder
    if folder is None or not re.search(r"[\\/]", pair.name):
        return cache_home() / "pairs" / f"{re.sub(r'[^A-Za-z0-9_.+-]+', '-', pair.name)}.json"
    digest = hashlib.sha256(str(folder.expanduser().resolve()).encode()).hexdigest()[:8]
    return cache_home() / "pairs" / f"{folder.expanduser().resolve().name}-{digest}.json"


def machine_of(device: Any, dtype: Any) -> str:
    """What a measurement holds for."""
    import torch

    name = torch.cuda.get_device_name(device) if str(device).startswith("cuda") else cpu_name()
    threads = "" if str(device).startswith("cuda") else f", {torch.get_num_threads()} threads"
    return f"{name}{threads}, {str(dtype).removeprefix('torch.')}"


def read_tuned(pair: Pair, machine: str) -> dict[int, Best]:
    """Empty where nothing was tuned here; a broken file is as good as none."""
    found: dict[int, Best] = {}
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        entries = json.loads(tuned_path(pair).read_text())["machines"][machine]["by_concurrency"]
        for entry in entries:
            found[int(entry["concurrency"])] = Best(parse_method(entry["method"]), int(entry["k"]))
    return found


def write_tuned(pair: Pair, machine: str, entry: dict[str, Any]) -> Path:
    path = tuned_path(pair)
    known: dict[str, Any] = {}
    with suppress(OSError, ValueError, KeyError, TypeError):
        known = dict(json.loads(path.read_text())["machines"])
    try:
        write_json(
            path, {"format": FORMAT, "pair": pair.name, "machines": known | {machine: entry}}
        )
    except OSError as error:
        raise UserError(
            f"cannot write {path} ({error}): set PEAGLE_HOME to a folder that can be written"
        ) from error
    return path
