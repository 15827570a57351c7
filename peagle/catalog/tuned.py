"""Results of `peagle tune`: the best method and K at each concurrency on a machine.

Each pair has a file PEAGLE_HOME/pairs/NAME.json with one entry per machine (GPU or CPU, dtype, and
format of weights as stored).
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
    """The file of the pair; for a folder, its name includes a digest of the path."""
    folder = pair.target.folder
    if folder is None or not re.search(r"[\\/]", pair.name):
        return cache_home() / "pairs" / f"{re.sub(r'[^A-Za-z0-9_.+-]+', '-', pair.name)}.json"
    path = folder.expanduser().resolve()
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    return cache_home() / "pairs" / f"{path.name}-{digest}.json"


def machine_of(device: Any, dtype: Any, stored_format: str | None = None) -> str:
    """The key of a measurement: device, number of CPU threads, dtype, format of stored weights."""
    import torch

    name = torch.cuda.get_device_name(device) if str(device).startswith("cuda") else cpu_name()
    threads = "" if str(device).startswith("cuda") else f", {torch.get_num_threads()} threads"
    weights = f", {stored_format}" if stored_format else ""
    return f"{name}{threads}, {str(dtype).removeprefix('torch.')}{weights}"


def read_tuned(pair: Pair, machine: str) -> dict[int, Best]:
    """The best choice by concurrency; empty without a readable measurement of this machine."""
    choices: dict[int, Best] = {}
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        entries = json.loads(tuned_path(pair).read_text())["machines"][machine]["by_concurrency"]
        for entry in entries:
            best = Best(parse_method(entry["method"]), int(entry["k"]))
            choices[int(entry["concurrency"])] = best
    return choices


def write_tuned(pair: Pair, machine: str, entry: dict[str, Any]) -> Path:
    """Add or replace the entry of `machine`; entries of other machines stay."""
    path = tuned_path(pair)
    machines: dict[str, Any] = {}
    with suppress(OSError, ValueError, KeyError, TypeError):
        machines = dict(json.loads(path.read_text())["machines"])
    content = {"format": FORMAT, "pair": pair.name, "machines": machines | {machine: entry}}
    try:
        write_json(path, content)
    except OSError as error:
        raise UserError(
            f"cannot write {path} ({error}): set PEAGLE_HOME to a writable folder"
        ) from error
    return path
