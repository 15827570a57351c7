"""The dtype for computation. `auto` on a CPU is measured once per kind of machine and stored."""

import json
import time
from collections.abc import Callable
from contextlib import suppress

import torch
from torch.nn.functional import linear

from peagle.errors import UserError
from peagle.machine import cpu_name
from peagle.paths import cache_home, write_json

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MEASURED_DTYPES = ("float32", "bfloat16")
MATRIX_SHAPE = (1536, 576)  # one MLP projection of the default target
ROW_COUNTS = (1, 8)  # a plain step, and a verify step with K = 7
MAX_STORED = 64  # kinds of machines, thread counts and versions of PyTorch; the oldest are dropped
MIN_SPEEDUP = 1.1  # bfloat16 must be clearly faster, because float32 is more precise
Times = dict[str, float]  # dtype -> microseconds


def measure_dtypes(repeats: int = 60, rounds: int = 5) -> Times:
    """Time one projection in a plain and a verify step; the best of interleaved rounds."""
    best = dict.fromkeys(MEASURED_DTYPES, float("inf"))
    weights = {name: torch.randn(MATRIX_SHAPE).mul_(0.02).to(DTYPES[name]) for name in best}
    inputs = {
        name: [torch.randn(rows, MATRIX_SHAPE[1]).to(DTYPES[name]) for rows in ROW_COUNTS]
        for name in best
    }
    for _ in range(rounds):
        for name in best:
            start = time.perf_counter()
            for _ in range(repeats):
                for x in inputs[name]:
                    linear(x, weights[name])
            best[name] = min(best[name], (time.perf_counter() - start) / repeats * 1e6)
    return {name: round(value, 1) for name, value in best.items()}


def choose_dtype(
    name: str, device: str, measure: Callable[[], Times] = measure_dtypes
) -> torch.dtype:
    """The dtype with that name; for "auto", bfloat16 on a GPU and the faster one on a CPU."""
    if name in DTYPES:
        return DTYPES[name]
    if name != "auto":
        raise UserError(f"unknown dtype {name!r}: use auto, {', '.join(DTYPES)}")
    return torch.bfloat16 if device.startswith("cuda") else _faster_on_cpu(measure)


def _faster_on_cpu(measure: Callable[[], Times]) -> torch.dtype:
    path = cache_home() / "precision.json"
    key = f"{cpu_capability()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    stored: dict[str, Times] = {}
    try:
        stored |= json.loads(path.read_text())
        times = {name: float(stored[key][name]) for name in MEASURED_DTYPES}
    except (OSError, ValueError, TypeError, KeyError):
        times = measure()
        with suppress(OSError):  # in a read-only folder, the next call measures again
            stored.pop(key, None)  # the new one is the last
            stored[key] = times
            write_json(path, dict(list(stored.items())[-MAX_STORED:]))
    faster = times["bfloat16"] * MIN_SPEEDUP < times["float32"]
    return torch.bfloat16 if faster else torch.float32


def cpu_capability() -> str:
    """The CPU and PyTorch's instruction set on it: several machines may share the folder.

    The name of the host is no part of it: every container has a new one.
    """
    return f"{cpu_name()} {torch.backends.cpu.get_cpu_capability()}"
