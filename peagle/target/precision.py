"""Which dtype to compute in: what this machine is fast at, measured once and remembered."""

import json
import platform
import time
from contextlib import suppress

import torch
from torch.nn.functional import linear

from peagle.errors import UserError
from peagle.paths import cache_home, write_json

NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CANDIDATES = ("float32", "bfloat16")
SHAPE = (1536, 576)  # one MLP projection of the default target
ROWS = (1, 8)  # a plain step and a verify step with K = 7
WORTH = 1.1  # float32 is the safer choice: it gives way only to a clear win


def choose_dtype(wanted: str, device: str) -> torch.dtype:
    """`auto`, or a dtype's name."""
    if wanted in NAMES:
        return NAMES[wanted]
    if wanted != "auto":
        raise UserError(f"unknown dtype {wanted!r}: use auto, {', '.join(NAMES)}")
    return torch.bfloat16 if device.startswith("cuda") else _fast_on_cpu()


def _fast_on_cpu() -> torch.dtype:
    path = cache_home() / "precision.json"
    key = f"{cpu_capability()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    known: dict[str, dict[str, float]] = {}
    try:
        known |= json.loads(path.read_text())
        times = {name: float(known[key][name]) for name in CANDIDATES}
    except (OSError, ValueError, TypeError, KeyError):
        times = measure()
        with suppress(OSError):  # a read-only home: measured again next time
            write_json(path, known | {key: times})
    return torch.bfloat16 if times["bfloat16"] * WORTH < times["float32"] else torch.float32


def measure(repeats: int = 60) -> dict[str, float]:
    """Microseconds for a plain and a verify step's projection, per dtype: the best of interleaved runs."""
    best = dict.fromkeys(CANDIDATES, float("inf"))
    weights = {name: torch.randn(SHAPE).mul_(0.02).to(NAMES[name]) for name in best}
    rows = {name: [torch.randn(r, SHAPE[1]).to(NAMES[name]) for r in ROWS] for name in best}
    for _ in range(5):
        for name in best:
            start = time.perf_counter()
            for _ in range(repeats):
                for x in rows[name]:
                    linear(x, weights[name])
            best[name] = min(best[name], (time.perf_counter() - start) / repeats * 1e6)
    return {name: round(value, 1) for name, value in best.items()}


def cpu_capability() -> str:
    """This machine, and the instruction set PyTorch uses on it: a home may be shared by several."""
    return f"{platform.node()} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
