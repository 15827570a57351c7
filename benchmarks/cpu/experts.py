"""Mixtures of experts on this CPU: passes through the C layers, PyTorch and transformers.

    python -m benchmarks.cpu.experts [--layers 2] [--rounds 5] [--dtype bfloat16]

Layers have the sizes of published models and random weights; the vocabulary is small. A pass
computes the first tokens of one request, and its rows choose experts by their random hidden states.
`pytorch` are the same fused layers with PyTorch's products and a loop over touched experts,
`transformers` is the model's own forward pass. The ways measure in turns, and the best round of
each counts.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from peagle.bench.random_models import random_model
from peagle.bench.shapes import shape_config
from peagle.engine.kv.kv_cache import KVCache
from peagle.engine.model.cpu_experts import CpuExperts
from peagle.engine.model.fused_llama import FusedLlamaTarget
from peagle.engine.model.mixture import Mixture
from peagle.engine.model.verifier import build_verifier, target_kv_shapes
from peagle.engine.step.step_measurements import last_expert_load
from peagle.kernels.cpu.library import kernel_state
from peagle.kernels.row_pass import RowPass
from peagle.machine import cpu_name
from peagle.target import Target

CASES = [("qwen3-30b-a3b", "bf16"), ("gpt-oss-20b", "bf16"), ("gpt-oss-20b", "mxfp4")]
ROWS = (1, 8, 64)
PAGE_SIZE = 64
VOCAB_SIZE = 4096


def make_target(shape: str, experts: Any, layers: int, dtype: torch.dtype) -> Target:
    config = shape_config(shape)
    config.num_hidden_layers = layers
    config.vocab_size = VOCAB_SIZE
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    torch.manual_seed(0)
    return Target(random_model(config, "cpu", dtype, experts), name=shape)


def fused_target(target: Target) -> FusedLlamaTarget:
    verifier = build_verifier(target, PAGE_SIZE)
    assert isinstance(verifier, FusedLlamaTarget)
    return verifier


def without_c_layers(target: Target) -> FusedLlamaTarget:
    """Layers whose experts are not packed; attention and norms stay in C, operation by operation.

    Their other matrices stay packed too.
    """
    verifier = fused_target(target)
    verifier.cpu_layers = None
    for i, layer in enumerate(verifier.layers):
        mlp = layer.mlp
        assert isinstance(mlp, Mixture)
        plain = CpuExperts(mlp.gate_up, mlp.down, mlp.activation, torch.float16)
        verifier.layers[i] = replace(layer, cpu_layer=None, mlp=replace(mlp, cpu_experts=plain))
    return verifier


def fused_pass(verifier: FusedLlamaTarget, target: Target, rows: int) -> Callable[[], object]:
    kv_cache = KVCache(target_kv_shapes(target), 1, PAGE_SIZE, target.device)
    positions = torch.arange(rows)
    start, count = (torch.tensor([n], dtype=torch.int32) for n in (0, rows))
    tables = torch.zeros(1, 1, dtype=torch.int32)
    row_pass = RowPass(positions, positions, tables, start, count, start, rows, PAGE_SIZE)
    return lambda: verifier.forward(token_ids(rows), row_pass, kv_cache)


def token_ids(rows: int) -> torch.Tensor:
    return torch.randint(VOCAB_SIZE, (rows,), generator=torch.Generator().manual_seed(rows))


@torch.inference_mode()
def measure(target: Target, rounds: int) -> None:
    """Print milliseconds of each way and number of rows, and what the C layers read."""
    in_c, in_pytorch, in_int8 = fused_target(target), without_c_layers(target), fused_target(target)
    assert in_c.cpu_layers is not None
    in_int8.quantize()
    for rows in ROWS:
        ways: dict[str, Callable[[], object]] = {
            "c": fused_pass(in_c, target, rows),
            "c int8": fused_pass(in_int8, target, rows),
            "pytorch": fused_pass(in_pytorch, target, rows),
            "transformers": partial(target.forward, token_ids(rows)),
        }
        best = dict.fromkeys(ways, float("inf"))
        for _ in range(rounds):
            for name, run in ways.items():
                started = time.perf_counter()
                run()
                best[name] = min(best[name], 1000 * (time.perf_counter() - started))
        load = last_expert_load(in_c)
        assert load is not None
        read = load.layer_bytes / best["c"] / 1e6
        times = ", ".join(f"{name} {ms:.1f} ms" for name, ms in best.items())
        ratios = ", ".join(f"{best[name] / best['c']:.2f}" for name in ways)
        print(f"  {rows} rows, {load.touched:.0f} of {load.experts} experts: {times}")
        print(f"    over c: {ratios}; c reads {read:.1f} GB/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    options = parser.parse_args()
    print(f"{cpu_name()}, {kernel_state()}, {torch.get_num_threads()} threads")
    for shape, experts in CASES:
        print(f"{shape}, {experts} experts, {options.layers} layers, {options.dtype}", flush=True)
        dtype = getattr(torch, options.dtype)
        measure(make_target(shape, experts, options.layers, dtype), options.rounds)


if __name__ == "__main__":
    main()
