"""The dtype for computation. `auto` on a CPU is measured once per kind of machine and target."""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from peagle.errors import UserError
from peagle.kernels.cpu.level import chosen_level
from peagle.kernels.cpu.library import cache_key, kernel_build, kernel_state
from peagle.machine import available_cores, cpu_name
from peagle.paths import cache_home, write_json
from peagle.target.matrix_shapes import DEFAULT_SHAPES, MatrixShapes
from peagle.target.weight_speed import BF16_ROWS, ROW_COUNTS, PassTimes, measure_passes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MAX_STORED = 64  # measurements that are remembered; the oldest are dropped
MIN_SPEEDUP = 1.1  # what is less precise, or needs more memory, must be clearly faster
MAX_LOAD = 1.1  # running processes per core, over the last minute
UNDER_LOAD = ", under load"
Measure = Callable[[MatrixShapes, str | None], dict[str, PassTimes]]


@dataclass(frozen=True, slots=True)
class SpeedChoice:
    """What `auto` chooses on this CPU, and the times behind it."""

    chosen: str  # float32, bfloat16, `Q4_1` or `Q4_1 with bfloat16` for example
    times: dict[str, PassTimes]  # candidate -> rows -> milliseconds of a pass of the target
    machine: str  # CPU, kernels, threads and versions for which it holds

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations."""
        rounds = self.chosen.endswith(BF16_ROWS)
        return torch.bfloat16 if rounds else DTYPES.get(self.chosen, torch.float32)

    @property
    def stored(self) -> bool:
        """Whether weights stay as a GGUF file stores them."""
        return self.chosen not in DTYPES

    def among_stored(self) -> "SpeedChoice":
        """The choice if only the stored weights exist; float32 if no kernel reads them."""
        times = {name: t for name, t in self.times.items() if name not in DTYPES}
        if not times:
            return replace(self, chosen="float32")
        return replace(self, chosen=choose_candidate(times), times=times)

    @property
    def text(self) -> str:
        """`bfloat16: 5.21 ms for a pass of 8 rows; float32: 11 ms`"""
        rows = max(ROW_COUNTS)
        others = [name for name in self.times if name != self.chosen]
        first = f"{self.chosen}: {self.times[self.chosen][rows]:.3g} ms for a pass of {rows} rows"
        return "; ".join([first, *(f"{name}: {self.times[name][rows]:.3g} ms" for name in others)])

    def as_dict(self) -> dict[str, Any]:
        return {
            "chosen": self.chosen,
            "pass_ms": {name: {str(r): t for r, t in x.items()} for name, x in self.times.items()},
            "machine": self.machine,
        }


def choose_dtype(name: str, device: str) -> torch.dtype:
    """The dtype with that name; for "auto", bfloat16 on a GPU and the faster one on a CPU."""
    if name in DTYPES:
        return DTYPES[name]
    if name != "auto":
        raise UserError(f"unknown dtype {name!r}: use auto, {', '.join(DTYPES)}")
    return torch.bfloat16 if device.startswith("cuda") else measured_choice(None).dtype


def measured_choice(
    shapes: MatrixShapes | None,
    stored_format: str | None = None,
    measure: Measure = measure_passes,
) -> SpeedChoice:
    """Choose for a target of these shapes, from a remembered measurement or a new one.

    Where the shapes are not known, those of the default target are measured.
    `stored_format`: of the blocks of the target's GGUF file, if it has one.
    """
    shapes = shapes or DEFAULT_SHAPES
    path = cache_home() / "precision.json"
    machine = machine_key()
    key = f"{machine}, {shapes.name}{f', {stored_format}' if stored_format else ''}"
    if is_overloaded():
        key += UNDER_LOAD
    stored: dict[str, Any] = {}
    try:
        stored |= json.loads(path.read_text())
        # Times of an idle machine are preferred, also under load.
        times = read_times(stored.get(key.removesuffix(UNDER_LOAD)) or stored[key])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        times = measure(shapes, stored_format)
        with suppress(OSError):  # in a read-only folder, the next call measures again
            stored.pop(key, None)  # the new one is the last
            stored[key] = times
            write_json(path, dict(list(stored.items())[-MAX_STORED:]))
    return SpeedChoice(choose_candidate(times), times, machine)


def is_overloaded() -> bool:
    """Whether processes wait for a core.

    Times measured now serve while that lasts, so that answers do not depend on the process.
    """
    try:
        load = os.getloadavg()[0]
    except OSError:
        return False
    return load > MAX_LOAD * (available_cores() or 1)


def read_times(record: dict[str, Any]) -> dict[str, PassTimes]:
    times = {
        name: {rows: float(values[str(rows)]) for rows in ROW_COUNTS}
        for name, values in record.items()
    }
    if not times.keys() >= {"float32", "bfloat16"}:
        raise KeyError("float32")
    return times


def choose_candidate(times: dict[str, PassTimes]) -> str:
    """Stored weights first, then float32, then bfloat16: each must clearly beat those before it.

    Stored weights lose nothing and take the least memory; bfloat16 rounds the activations. The
    time is that of all measured numbers of rows, from a plain step to a verify step.
    """
    dtypes = [name for name in ("float32", "bfloat16") if name in times]
    order = [*(name for name in times if name not in DTYPES), *dtypes]
    best = order[0]
    for name in order[1:]:
        if sum(times[name].values()) * MIN_SPEEDUP < sum(times[best].values()):
            best = name
    return best


def machine_key() -> str:
    """What a measurement depends on besides the shapes; several machines may share the folder.

    The name of the host is no part of it: every container has a new one.
    """
    return (
        f"{cpu_capability()}, kernels {kernel_state()}{kernel_version()},"
        f" {torch.get_num_threads()} threads, torch {torch.__version__}"
    )


def kernel_version() -> str:
    """` (1a2b3c4d5e6f7a8b)`, a hash of the compiled kernels' sources; empty without kernels."""
    built = kernel_build()
    return f" ({cache_key(built.compiler, chosen_level())})" if built is not None else ""


def cpu_capability() -> str:
    """The CPU and PyTorch's instruction set on it."""
    return f"{cpu_name()} {torch.backends.cpu.get_cpu_capability()}"
