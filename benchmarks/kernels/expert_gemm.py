"""Measure the expert kernels on a GPU: the mixtures of Qwen3-30B-A3B and GPT-OSS-20B.

    python -m benchmarks.kernels.expert_gemm [--rows 1,8,64,512] [--formats bf16,mxfp4] [--sweep]

Results are in terabytes per second, counting the experts that random rows touch. A CUDA graph runs
the product for several sets of rows, one after another, which together touch more than the cache
holds. `--sweep` tries tile sizes in several processes, of which one measures at a time, and prints
the best ones beside `tile_sizes`.
"""

import argparse
import fcntl
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.cuda_graphs import replay_seconds
from peagle.kernels.expert_matrices import ExpertMatrices, GatedActivation
from peagle.kernels.mxfp4_tiles import TILE_BYTES
from peagle.kernels.triton.experts.expert_gemm import expert_down, expert_gate_up
from peagle.kernels.triton.experts.route import RouterParams, Routing, route
from peagle.kernels.triton.experts.tiles import ExpertTiles, block_rows

BEST_COUNT = 4


@dataclass(frozen=True)
class Mixture:
    experts: int
    top_k: int
    hidden: int
    inner: int
    activation: GatedActivation


MIXTURES = {
    "qwen3-30b-a3b": Mixture(128, 8, 2048, 768, GatedActivation()),
    "gpt-oss-20b": Mixture(32, 4, 2880, 2880, GatedActivation(True, 1.702, 7.0, 1.0)),
}


@dataclass(frozen=True)
class Case:
    mixture: str
    product: str  # gate_up or down
    format: str
    rows: int


class ExpertProduct:
    """One product of a mixture with random experts, over several sets of random rows."""

    def __init__(self, case: Case) -> None:
        mixture = MIXTURES[case.mixture]
        self.case = case
        self.activation = mixture.activation
        torch.manual_seed(0)
        gated = case.product == "gate_up"
        n, k = (2 * mixture.inner, mixture.hidden) if gated else (mixture.hidden, mixture.inner)
        self.matrices = random_matrices(case.format, mixture.experts, n, k)
        params = RouterParams(mixture.top_k, normalized=True)
        router = torch.randn(mixture.experts, mixture.hidden, device="cuda").bfloat16()
        sets = max(2, min(8, 600_000_000 // (self.matrices.expert_bytes * mixture.top_k)))
        self.routings: list[Routing] = []
        self.xs: list[Tensor] = []
        for _ in range(sets):
            x = torch.randn(case.rows, mixture.hidden, device="cuda").bfloat16()
            counts = torch.zeros(mixture.experts + 1, dtype=torch.int32, device="cuda")
            arrived = torch.zeros(1024, dtype=torch.int32, device="cuda")
            self.routings.append(route(x, router, None, params, counts, arrived))
            width = mixture.hidden if gated else mixture.inner
            length = case.rows if gated else case.rows * mixture.top_k
            self.xs.append(torch.randn(length, width, device="cuda").bfloat16())
        self.touched = sum(int(r.counts[-1]) for r in self.routings) / sets

    def run(self, tiles: ExpertTiles | None) -> None:
        for x, routing in zip(self.xs, self.routings, strict=True):
            if self.case.product == "gate_up":
                expert_gate_up(x, self.matrices, self.activation, routing, tiles)
            else:
                expert_down(x, self.matrices, routing, tiles)

    def terabytes_per_second(self, tiles: ExpertTiles | None, lock: str) -> float:
        self.run(tiles)
        torch.cuda.synchronize()
        with Path(lock).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            seconds = graph_seconds(lambda: self.run(tiles)) / len(self.xs)
        return self.touched * self.matrices.expert_bytes / seconds / 1e12


def random_matrices(format: str, experts: int, n: int, k: int) -> ExpertMatrices:
    if format == "mxfp4":
        codes = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8, device="cuda")
        scales = torch.randint(118, 122, (experts, n, k // 32), dtype=torch.uint8, device="cuda")
        return ExpertMatrices(codes, scales).for_gpu(torch.bfloat16)
    weight = (torch.randn(experts, n, k, device="cuda", dtype=torch.bfloat16) * 0.02).contiguous()
    if format == "bf16":
        return ExpertMatrices(weight)
    scales = torch.full((experts, n), 0.01, device="cuda")
    return ExpertMatrices((weight * 100).to(torch.float8_e4m3fn), scales)


def graph_seconds(run: Callable[[], None]) -> float:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return replay_seconds(graph)


def candidates(case: Case, matrices: ExpertMatrices) -> Iterator[ExpertTiles]:
    mixture = MIXTURES[case.mixture]
    block_t = block_rows(matrices, case.rows * mixture.top_k / mixture.experts, case.rows)
    if matrices.is_tiled:  # at most two warps: see tile_sizes
        grid = itertools.product((16, 32, 64), (TILE_BYTES,), itertools.product((1, 2), (3, 4, 6)))
    elif block_t <= 32:
        settings = ((2, 4), (2, 6), (2, 8), (4, 3), (4, 4), (4, 6), (8, 3))
        grid = itertools.product((32, 64, 128), (64, 128, 256), settings)
    else:
        grid = itertools.product((32, 64, 128), (64, 128), ((4, 3), (4, 4), (8, 3), (8, 4)))
    for block_n, block_k, (warps, stages) in grid:
        yield ExpertTiles(block_n, block_k, warps, stages)


def sweep(case: Case, lock: str, deadline: float) -> dict[str, object]:
    """The speed of the tiles in use, and of the best others."""
    try:
        product = ExpertProduct(case)
        used = product.terabytes_per_second(None, lock)
        speeds: dict[str, float] = {}
        tiles = list(candidates(case, product.matrices))
        random.Random(0).shuffle(tiles)
        for tile in tiles:
            if time.time() > deadline:
                break
            try:
                speeds[str(tuple(tile))] = round(product.terabytes_per_second(tile, lock), 2)
            except Exception as error:  # too much shared memory, for example
                print(case, tile, str(error)[:80], file=sys.stderr)
        best = dict(sorted(speeds.items(), key=lambda item: -item[1])[:BEST_COUNT])
        touched = round(product.touched, 1)
        return {
            **vars(case),
            "touched": touched,
            "used": round(used, 2),
            "tried": len(speeds),
            **best,
        }
    except Exception as error:
        return {**vars(case), "error": repr(error)[:300]}


def time_routes(rows: list[int]) -> None:
    for name, mixture in MIXTURES.items():
        params = RouterParams(mixture.top_k, normalized=True)
        router = torch.randn(mixture.experts, mixture.hidden, device="cuda").bfloat16()
        for count in rows:
            x = torch.randn(count, mixture.hidden, device="cuda").bfloat16()
            counts = torch.zeros(16, mixture.experts + 1, dtype=torch.int32, device="cuda")
            arrived = torch.zeros(1024, dtype=torch.int32, device="cuda")

            def run() -> None:
                counts.zero_()  # noqa: B023
                for own in counts:  # noqa: B023
                    route(x, router, None, params, own, arrived)  # noqa: B023

            run()
            print(name, "route", count, "rows:", f"{1e6 * graph_seconds(run) / 16:.1f} us")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default="1,8,64,512")
    parser.add_argument("--formats", default="bf16,mxfp4")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=150)
    options = parser.parse_args()
    rows = [int(word) for word in options.rows.split(",")]
    cases = [
        Case(*values)
        for values in itertools.product(
            MIXTURES, ("gate_up", "down"), options.formats.split(","), rows
        )
        if not (values[0] == "qwen3-30b-a3b" and values[2] == "mxfp4")
    ]
    time_routes(rows)
    with tempfile.NamedTemporaryFile() as lock:
        if not options.sweep:
            for case in cases:
                product = ExpertProduct(case)
                speed = product.terabytes_per_second(None, lock.name)
                print(json.dumps({**vars(case), "tb_per_s": round(speed, 2)}), flush=True)
            return
        deadline = time.time() + options.seconds
        with ProcessPoolExecutor(options.workers, get_context("spawn")) as pool:
            for result in pool.map(
                sweep, cases, itertools.repeat(lock.name), itertools.repeat(deadline)
            ):
                print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
