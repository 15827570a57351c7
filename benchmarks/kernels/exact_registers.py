"""Registers, spills and shared memory of the kernels of exact mode on Hopper. Needs no GPU.

    PYTHONPATH=. python -m benchmarks.kernels.exact_registers

The kernels that the rules choose for SmolLM2-135M and Llama-3.1-8B are compiled for sm_90 and
assembled by Triton's ptxas. `serialized`: ptxas makes tensor-core products wait for each other.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from benchmarks.exact.products import MATRICES
from peagle.kernels.attention_params import AttentionParams
from peagle.kernels.row_pass import RowPass
from peagle.kernels.triton import skinny_gemm
from peagle.kernels.triton.attention.attention_plan import new_split_counters
from peagle.kernels.triton.batch_invariant import gemm, paged_attention, tree_lanes
from peagle.kernels.triton.batch_invariant.vendor_gemm import own_product
from tests.support.kernels import fake_gpu

ROW_COUNTS = (8, 32, 64, 128, 512, 2048)
HEADS = {"smollm2": (9, 3, 64), "8b": (32, 8, 128)}
PASSES = ((1, 1, 0), (1, 8, 0), (1, 32, 11), (64, 8, 0), (64, 32, 11))  # requests, rows, tree depth
PTXAS = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"


class CompiledKernels:
    """The kernels that were launched, compiled for Hopper instead."""

    def __init__(self, modules: Iterable[ModuleType]) -> None:
        """`modules`: those that launch kernels, or decide whether to."""
        fake_gpu.set_active()
        self.kernels: list[Any] = []
        compile_kernel = JITFunction.run

        def run(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            kernel = compile_kernel(function, *args, grid=grid, warmup=True, **options)
            self.kernels.append(kernel)
            return kernel

        JITFunction.run = run
        for module in modules:
            module.uses_triton = lambda x: True  # type: ignore[attr-defined]
            module.launch_options = lambda x: {"DEPENDENT": True, "launch_pdl": True}  # type: ignore[attr-defined]

    def print_kernel(self, name: str, launch: Callable[[], object]) -> int:
        """Returns the number of kernels that spill."""
        launch()
        lines = [assembled(kernel) for kernel in self.kernels]
        for line in lines:
            print(f"{name:44} {line}", flush=True)
        self.kernels.clear()
        return sum(", 0 bytes spilled" not in line for line in lines)


def assembled(kernel: Any) -> str:
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(kernel.asm["ptx"])
        file.flush()
        command = [str(PTXAS), "-arch=sm_90a", "-v", file.name, "-o", "/dev/null"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", text)
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill stores", text)))
    serialized = ", serialized" if "serialized" in text else ""
    count = registers[1] if registers else "?"
    shared = kernel.metadata.shared
    return f"{count:>3} registers, {spilled} bytes spilled, {shared} shared{serialized}"


def new_pass(requests: int, count: int, depth: int) -> RowPass:
    rows = torch.zeros(requests * count, dtype=torch.int64)
    zeros = torch.zeros(requests, dtype=torch.int32)
    tables = torch.zeros(requests, 32, dtype=torch.int32)
    row_pass = RowPass(rows, rows, tables, zeros, zeros, zeros, count, 64)
    if depth:
        row_pass.tree_masks = rows
        row_pass.tree_depth = depth
    return row_pass


def attend(heads: tuple[int, int, int], rows: RowPass) -> Tensor:
    num_heads, kv_heads, d = heads
    query = torch.empty(len(rows.positions), num_heads, d, dtype=torch.bfloat16)
    cache = torch.empty(64, kv_heads, d, dtype=torch.bfloat16)
    counters = new_split_counters(query.device)
    params = AttentionParams(d**-0.5)
    return paged_attention.invariant_attention(query, cache, cache, rows, params, query, counters)


def main() -> None:
    compiled = CompiledKernels((skinny_gemm, gemm, paged_attention, tree_lanes))
    for name, (n, k) in MATRICES.items():
        weight = torch.empty(n, k, dtype=torch.bfloat16)
        for rows in ROW_COUNTS:
            x = torch.empty(rows, k, dtype=torch.bfloat16)
            gated = name.endswith("gate_up")
            compiled.print_kernel(f"{name}, {rows} rows", lambda: own_product(x, weight, gated))  # noqa: B023
    for model, heads in HEADS.items():
        for requests, count, depth in PASSES:
            name = f"attention {model} {requests} x {count}{' tree' if depth else ''}"
            rows_of_pass = new_pass(requests, count, depth)
            compiled.print_kernel(name, lambda: attend(heads, rows_of_pass))  # noqa: B023


if __name__ == "__main__":
    main()
