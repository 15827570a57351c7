"""The kernel of few rows on a GPU: a weight in bf16, int8 and fp8, matrices of Llama-3.1-8B, terabytes a second.

    python -m tests.measure_few_rows [--rows 1,8,16] [--sweep] [--seconds 240]

Weights are read from memory, not from a cache: copies of more than the cache, one after another in a CUDA graph.
`--sweep` tries sizes of blocks for the 8-bit weights at 8 rows and prints the best, beside what `blocks` chooses now.
"""

import argparse
import itertools
import json
import time

import torch
from torch import Tensor

from peagle.kernels.triton import skinny_gemm

SHAPES = {"qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
KINDS = {"bf16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
MUCH, REPEATS = 400 << 20, 10  # bytes: several times the cache of an H200
SWEEP = {
    "BLOCK_N": (16, 32, 64),
    "BLOCK_K": (64, 128, 256),
    "num_warps": (2, 4),
    "num_stages": (4, 8),
}


def made(n: int, k: int, kind: torch.dtype) -> list[Tensor]:
    one = torch.randint(-100, 101, (n, k), device="cuda").float().to(kind)
    return [one.clone() for _ in range(-(-MUCH // one.nbytes))]


def seconds_of(x: Tensor, weights: list[Tensor], scales: Tensor | None, gate: bool) -> float:
    """Of one product."""

    def products() -> None:
        for weight in weights:
            if gate:
                skinny_gemm.gated_skinny_gemm(x, weight, scales)
            else:
                skinny_gemm.skinny_gemm(x, weight, None, scales)

    products()  # compiled here
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        products()
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(REPEATS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000 / REPEATS / len(weights)


def measure(name: str, kind: str, rows: int) -> dict[str, object]:
    n, k = SHAPES[name]
    weights, x = made(n, k, KINDS[kind]), torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    scales = None if kind == "bf16" else torch.rand(n, device="cuda")
    spent = seconds_of(x, weights, scales, name == "gate_up")
    speed = weights[0].nbytes / spent / 1e12
    return {
        "matrix": name,
        "weight": kind,
        "rows": rows,
        "us": round(spent * 1e6, 1),
        "tb_per_second": round(speed, 2),
    }


def sweep(name: str, kind: str, end: float) -> dict[str, object]:
    n, k = SHAPES[name]
    weights, x = made(n, k, KINDS[kind]), torch.randn(8, k, device="cuda", dtype=torch.bfloat16)
    scales, chosen = torch.rand(n, device="cuda"), skinny_gemm.blocks
    found: list[tuple[float, dict[str, int]]] = []
    now = seconds_of(x, weights, scales, name == "gate_up")
    for values in itertools.product(*SWEEP.values()):
        sizes = dict(zip(SWEEP, values, strict=True))
        if time.monotonic() > end:
            break
        skinny_gemm.blocks = lambda *_, sizes=sizes: sizes  # type: ignore[assignment]
        try:
            found.append((seconds_of(x, weights, scales, name == "gate_up"), sizes))
        except Exception as error:  # too much shared memory, say
            print(
                json.dumps(
                    {"matrix": name, "weight": kind, "sizes": sizes, "failed": repr(error)[:120]}
                ),
                flush=True,
            )
        finally:
            skinny_gemm.blocks = chosen
    best = sorted(found, key=lambda one: one[0])[:3]
    told = [{"us": round(spent * 1e6, 1)} | sizes for spent, sizes in best]
    return {
        "matrix": name,
        "weight": kind,
        "now_us": round(now * 1e6, 1),
        "best": told,
        "tried": len(found),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default="1,8,16")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--seconds", type=float, default=240)
    asked = parser.parse_args()
    end = time.monotonic() + asked.seconds
    for name, kind, rows in itertools.product(SHAPES, KINDS, map(int, asked.rows.split(","))):
        if time.monotonic() < end:
            print(json.dumps(measure(name, kind, rows)), flush=True)
    for name, kind in itertools.product(SHAPES, ("int8", "fp8")) if asked.sweep else ():
        if time.monotonic() < end:
            print(json.dumps(sweep(name, kind, end)), flush=True)


if __name__ == "__main__":
    main()
