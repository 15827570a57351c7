"""How long a pass of a target takes on this CPU, by the way in which its weights are kept.

Matrices with the target's own shapes are multiplied, so many that the last-level cache does not
hold them: a step reads every weight from memory, and a probe that fits the cache would not notice.

The experts of a mixture are timed by themselves, with the rows that a touched expert has on average
(expert_shapes.py). MXFP4 experts stay as they are for every candidate.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear

from peagle.kernels.cpu.library import kernel_build
from peagle.kernels.cpu.matrix import Mxfp4Matrix, PackedMatrix, can_pack
from peagle.kernels.cpu.reordered import can_reorder, multiply_reordered, reorder
from peagle.kernels.expert_matrices import MXFP4_BIAS, MXFP4_BLOCK
from peagle.kernels.stored_matrix import BLOCK_FORMATS, StoredMatrix
from peagle.target.expert_shapes import ExpertShapes, Shape
from peagle.target.matrix_shapes import MatrixShapes

ROW_COUNTS = (1, 4, 8)  # a plain step, and verify steps with K = 3 and K = 7
CACHE_SIZES = 3  # a candidate's matrices are this many times as large as the last-level cache,
MIN_BYTES = 48 << 20
MAX_BYTES = 160 << 20  # but not larger than this
DEFAULT_CACHE_BYTES = 32 << 20
MAX_SECONDS = 2.0  # of all candidates
MAX_ROUNDS = 8
MIN_ROUNDS = 3
BF16_ROWS = " with bfloat16"  # in the name of a candidate: the dtype of the activations
MAX_SCALE_BYTE = 0x40  # random bytes below it are never a NaN or infinity in a block's scales

Multiply = Callable[[Tensor], Tensor]  # x [T, inputs] -> [T, outputs]
PassTimes = dict[int, float]  # rows -> milliseconds of a pass over all weights of the target


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to keep weights. `build` returns None if this machine does not support it."""

    name: str
    dtype: torch.dtype  # of the activations
    bytes_per_weight: float
    build: Callable[[Shape], Multiply | None]


def candidates(stored_format: str | None) -> list[Candidate]:
    """What a target may run with; `stored_format`: of the blocks of its GGUF file, if it has one.

    Each builds what the engine uses for such weights (engine/model/weight.py).
    """
    offered = [
        Candidate("float32", torch.float32, 4, build_float32),
        Candidate("bfloat16", torch.bfloat16, 2, build_bfloat16),
    ]
    if stored_format in BLOCK_FORMATS:
        block = BLOCK_FORMATS[stored_format]
        density = block.size / block.inputs

        def build(shape: Shape) -> Multiply | None:
            return build_stored(shape, stored_format)

        offered.append(Candidate(stored_format, torch.float32, density, build))
        if has_bf16_dots():
            name = f"{stored_format}{BF16_ROWS}"
            offered.append(Candidate(name, torch.bfloat16, density, build))
    return offered


def has_bf16_dots() -> bool:
    """Whether the CPU multiplies pairs of bf16: elsewhere, rounding to bf16 only costs time."""
    built = kernel_build()
    return built is not None and "bf16" in built.features


def build_float32(shape: Shape) -> Multiply | None:
    """Weights of a bf16 checkpoint, widened. A kernel may pack them in bf16: nothing is lost."""
    weight = random_weight(shape).float()
    if can_pack(weight):
        return PackedMatrix(weight)
    return lambda x: linear(x, weight)


def build_bfloat16(shape: Shape) -> Multiply | None:
    weight = random_weight(shape)
    if can_pack(weight):
        return PackedMatrix(weight)
    if can_reorder(weight):
        reordered = reorder(weight)
        return lambda x: multiply_reordered(x, reordered, None)
    return lambda x: linear(x, weight)


def build_stored(shape: Shape, stored_format: str) -> Multiply | None:
    """None if no kernel reads this format, or a row does not consist of whole blocks."""
    block = BLOCK_FORMATS[stored_format]
    if shape[1] % block.inputs:
        return None
    row_bytes = shape[1] // block.inputs * block.size
    blocks = torch.randint(MAX_SCALE_BYTE, (shape[0], row_bytes), dtype=torch.uint8)
    weight = StoredMatrix(stored_format, blocks)
    return PackedMatrix(weight) if can_pack(weight) else None


def build_mxfp4(shape: Shape) -> Multiply | None:
    codes = torch.randint(256, (shape[0], shape[1] // 2), dtype=torch.uint8)
    scales = torch.full((shape[0], shape[1] // MXFP4_BLOCK), MXFP4_BIAS - 6, dtype=torch.uint8)
    weight = Mxfp4Matrix(codes, scales)
    return PackedMatrix(weight) if can_pack(weight) else None


def expert_candidate(candidate: Candidate, experts: ExpertShapes) -> Candidate:
    """How the experts of the target are kept."""
    if not experts.is_mxfp4:
        return candidate
    density = 1 / 2 + 1 / MXFP4_BLOCK  # codes of 4 bits, and a byte per block
    return replace(candidate, bytes_per_weight=density, build=build_mxfp4)


@cache
def random_weight(shape: Shape) -> Tensor:
    """The same numbers for all matrices of a shape: drawing them takes longer than timing."""
    return torch.randn(shape, dtype=torch.bfloat16).mul_(0.02)


class Probe:
    """The matrices of one candidate, and the best times of their products.

    Products are timed one by one, and the fastest of a shape counts: on a busy machine most of
    them wait for other processes, hundreds of times as long as they take.
    """

    def __init__(
        self, candidate: Candidate, shapes: MatrixShapes | ExpertShapes, max_bytes: float
    ) -> None:
        self.shapes = shapes
        self.sample = shapes.sample(max_bytes / candidate.bytes_per_weight)
        built = [candidate.build(shape) for shape in self.sample]
        self.matrices = [multiply for multiply in built if multiply is not None]
        self.supported = len(self.matrices) == len(self.sample)
        self.inputs = {
            rows: {
                k: torch.randn(shapes.matrix_rows(rows), k).to(candidate.dtype)
                for _, k in self.sample
            }
            for rows in ROW_COUNTS
        }
        # From the sampled matrices to all of the target.
        self.factor = shapes.weights / sum(n * k for n, k in self.sample)
        self.best: dict[tuple[int, Shape], float] = {}  # seconds, by rows and shape

    def run(self, rows: int, max_seconds: float) -> None:
        """Multiply every matrix once; after `max_seconds`, only shapes that have no time yet."""
        inputs = self.inputs[rows]
        deadline = time.perf_counter() + max_seconds
        for multiply, shape in zip(self.matrices, self.sample, strict=True):
            known = self.best.get((rows, shape), float("inf"))
            started = time.perf_counter()
            if started > deadline and known < float("inf"):
                continue
            multiply(inputs[shape[1]])
            self.best[rows, shape] = min(known, time.perf_counter() - started)

    @property
    def times(self) -> PassTimes:
        factors = {rows: 1000 * self.factor * self.shapes.share_read(rows) for rows in ROW_COUNTS}
        return {
            rows: round(factor * sum(self.best[rows, x] for x in self.sample), 3)
            for rows, factor in factors.items()
        }


@torch.inference_mode()
def measure_passes(
    shapes: MatrixShapes, stored_format: str | None = None, max_bytes: float | None = None
) -> dict[str, PassTimes]:
    """Time every candidate that this machine supports: about 2 seconds.

    One after the other, so that the matrices of only one candidate are in memory.
    """
    max_bytes = max_bytes or sample_bytes()
    offered = candidates(stored_format)
    times: dict[str, PassTimes] = {}
    for candidate in offered:
        parts = candidate_parts(candidate, shapes)
        seconds = MAX_SECONDS / len(offered) / len(parts)
        timed = [time_matrices(*part, max_bytes, seconds) for part in parts]
        supported = [part for part in timed if part is not None]
        if len(supported) == len(parts):
            times[candidate.name] = {
                rows: sum(part[rows] for part in supported) for rows in ROW_COUNTS
            }
    return times


def candidate_parts(
    candidate: Candidate, shapes: MatrixShapes
) -> list[tuple[Candidate, MatrixShapes | ExpertShapes]]:
    """What is timed for a candidate: the matrices that every row reads, and experts.

    Without kernels, MXFP4 experts are multiplied out in every pass: no candidate changes that.
    """
    experts = shapes.experts
    if experts is None or (experts.is_mxfp4 and kernel_build() is None):
        return [(candidate, shapes)]
    return [(candidate, shapes), (expert_candidate(candidate, experts), experts)]


def time_matrices(
    candidate: Candidate,
    shapes: MatrixShapes | ExpertShapes,
    max_bytes: float,
    max_seconds: float,
) -> PassTimes | None:
    """None if this machine does not support the candidate."""
    probe = Probe(candidate, shapes, max_bytes)
    random_weight.cache_clear()
    if not probe.supported:
        return None
    run_rounds(probe, max_seconds)
    return probe.times


def run_rounds(probe: Probe, max_seconds: float) -> None:
    deadline = time.perf_counter() + max_seconds
    run_seconds = max_seconds / (MIN_ROUNDS * len(ROW_COUNTS))
    for _ in range(MAX_ROUNDS):
        for rows in ROW_COUNTS:
            probe.run(rows, run_seconds)
        if time.perf_counter() > deadline:
            break


def sample_bytes() -> int:
    return min(max(CACHE_SIZES * last_level_cache_bytes(), MIN_BYTES), MAX_BYTES)


def last_level_cache_bytes(
    folder: Path = Path("/sys/devices/system/cpu/cpu0/cache"),
) -> int:
    """The size of the largest cache of the first CPU; a guess where the kernel does not tell."""
    sizes = [DEFAULT_CACHE_BYTES]
    with suppress(OSError, ValueError):
        texts = [file.read_text().strip() for file in folder.glob("index*/size")]
        sizes = [int(text.removesuffix("K")) << 10 for text in texts] or sizes
    return max(sizes)
