"""Measure the skinny GEMM kernel on a GPU: the matrices of Llama-3.1-8B in bf16, int8 and fp8.

    python -m benchmarks.kernels.skinny_gemm [--rows 1,8,16] [--sweep] [--seconds 240]

Results are in terabytes per second. Weights are read from memory, not from a cache: a CUDA graph
multiplies with copies that together are larger than the cache, one after another. `--sweep` tries
tile sizes for the 8-bit weights at 8 rows, and prints the best beside the time of `tile_sizes`.
"""

import argparse
import itertools
import json
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.cuda_graphs import replay_seconds
from peagle.kernels.triton.skinny_gemm import TileSizes, gated_skinny_gemm, skinny_gemm

SHAPES = {"qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
WEIGHT_DTYPES = {"bf16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
COPIES_BYTES = 400 << 20  # several times the cache of an H200
SWEEP_ROWS = 8
BEST_COUNT = 3
BLOCK_N = (16, 32, 64)
BLOCK_K = (64, 128, 256)
NUM_WARPS = (2, 4)
NUM_STAGES = (4, 8)


class Product:
    """The product of random rows with copies of one matrix."""

    def __init__(self, name: str, dtype: str, rows: int) -> None:
        n, k = SHAPES[name]
        weight = torch.randint(-100, 101, (n, k), device="cuda").float().to(WEIGHT_DTYPES[dtype])
        self.weights = [weight.clone() for _ in range(-(-COPIES_BYTES // weight.nbytes))]
        self.x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
        self.scales: Tensor | None = None if dtype == "bf16" else torch.rand(n, device="cuda")
        self.gated = name == "gate_up"

    def run(self, tiles: TileSizes | None) -> None:
        for weight in self.weights:
            if self.gated:
                gated_skinny_gemm(self.x, weight, self.scales, tiles)
            else:
                skinny_gemm(self.x, weight, None, self.scales, tiles)

    def seconds(self, tiles: TileSizes | None = None) -> float:
        """The time of one product."""
        self.run(tiles)  # compiles the kernel
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run(tiles)
        return replay_seconds(graph) / len(self.weights)


def microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def measure(name: str, dtype: str, rows: int) -> dict[str, object]:
    product = Product(name, dtype, rows)
    seconds = product.seconds()
    return {
        "matrix": name,
        "weight": dtype,
        "rows": rows,
        "us": microseconds(seconds),
        "tb_per_second": round(product.weights[0].nbytes / seconds / 1e12, 2),
    }


def sweep(name: str, dtype: str, deadline: float) -> dict[str, object]:
    product = Product(name, dtype, SWEEP_ROWS)
    now = product.seconds()
    timings: list[tuple[float, TileSizes]] = []
    for tiles in all_tiles():
        if time.monotonic() > deadline:
            break
        try:
            timings.append((product.seconds(tiles), tiles))
        except Exception as error:  # the tiles need too much shared memory, for example
            failure = {"sizes": sizes_record(tiles), "failed": repr(error)[:120]}
            print(json.dumps({"matrix": name, "weight": dtype} | failure), flush=True)
    best = sorted(timings, key=lambda timing: timing[0])[:BEST_COUNT]
    return {
        "matrix": name,
        "weight": dtype,
        "now_us": microseconds(now),
        "best": [{"us": microseconds(seconds)} | sizes_record(tiles) for seconds, tiles in best],
        "tried": len(timings),
    }


def all_tiles() -> Iterator[TileSizes]:
    for sizes in itertools.product(BLOCK_N, BLOCK_K, NUM_WARPS, NUM_STAGES):
        yield TileSizes(*sizes)


def sizes_record(tiles: TileSizes) -> dict[str, object]:
    return {
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default="1,8,16")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--seconds", type=float, default=240)
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    row_counts = [int(rows) for rows in options.rows.split(",")]
    for name, dtype, rows in itertools.product(SHAPES, WEIGHT_DTYPES, row_counts):
        if time.monotonic() < deadline:
            print(json.dumps(measure(name, dtype, rows)), flush=True)
    for name, dtype in itertools.product(SHAPES, ("int8", "fp8")) if options.sweep else ():
        if time.monotonic() < deadline:
            print(json.dumps(sweep(name, dtype, deadline)), flush=True)


if __name__ == "__main__":
    main()
