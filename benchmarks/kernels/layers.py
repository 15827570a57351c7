"""Time the kernels of a target's layers on a GPU, with random weights.

    python -m benchmarks.kernels.layers qwen3-30b-a3b,gpt-oss-20b [--layers 12] [--rows 1x1,8x1,8x6]
        [--context 256] [--tree 11] [--experts mxfp4] [--kernels] [--seconds 120]
        [--variants on+weights+rows,on+weights+rows+trees+route]

The first layers of a shape run in one CUDA graph, as in a step. `--rows` are requests x rows of
each. Results are microseconds per layer and the share of the floor: the bytes of the matrices, of
experts those touched, over the bandwidth; and whether they are equal to those of the first variant.

Variants: `off` runs kernels one after another, `on` overlaps them (dependent_launch.py). More
words, joined by +, switch on one thing each: `weights` of products load before their inputs exist
(skinny_gemm.py); `rows`: blocks of experts have room for the rows of several drafts, `trees`: for
more of them in large passes (tiles.py); `route`: the norm and the router of few rows are one launch
(norm_route.py);
`rotate`: attention rotates few rows itself (rotated_attention.py); `products` and `attention`:
those of exact mode (batch_invariant/); `16-4-64`: exact attention with blocks of 16 queries, 4
warps and tiles of 64 lanes, instead of its own plan; `library`: products of exact mode are left to
the vendor's library where it gives the same bits, as the engine does (vendor_gemm.py).
With `--tree 11`, the rows of a request are a likely tree of this depth; exact attention looks up
its lanes once per pass (tree_lanes.py): use many layers, and a context that is no multiple of 16.
With `--alike`, the rows of a request are alike and choose the same experts, as those of a draft do.
`--kernels` lists the mean duration of each kernel in a layer.
"""

import argparse
import itertools
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.cuda_graphs import replay_seconds
from benchmarks.likely_trees import with_likely_trees
from peagle.bench.random_models import parse_experts, random_model, shape_config
from peagle.engine.kv.kv_cache import KVCache, KVShape
from peagle.engine.model.dense_mlp import DenseMLP
from peagle.engine.model.fused_llama import FusedLlamaTarget
from peagle.engine.model.mixture import Mixture
from peagle.engine.model.verifier import target_kv_shapes
from peagle.kernels.row_pass import RowPass
from peagle.kernels.triton import skinny_gemm
from peagle.kernels.triton.attention import rotated_attention
from peagle.kernels.triton.batch_invariant import paged_attention as invariant_attention
from peagle.kernels.triton.batch_invariant.attention_plan import AttentionPlan, plan_attention
from peagle.kernels.triton.batch_invariant.vendor_gemm import ROW_COUNTS, VendorRows
from peagle.kernels.triton.experts import norm_route, tiles
from peagle.kernels.triton.launch import dependent_launch
from peagle.kernels.triton.launch.compile_ahead import compile_ahead
from peagle.target import Target

BANDWIDTH = 4.3e12
PAGE_SIZE = 16
VARIANTS = "off,on,on+weights+rows+rotate,on+weights+rows+rotate+trees+route"
SKINNY_TILES = skinny_gemm.tile_sizes
ALIKE_ROWS = tiles.ALIKE_ROWS
BUSY_EXPERTS = tiles.BUSY_EXPERTS
NORM_ROUTE_ROWS = norm_route.MAX_ROWS
PROVEN: dict[int, VendorRows] = {}  # by target


def switch(variant: str, target: FusedLlamaTarget) -> None:
    """Set the module variables and kernels that a variant stands for."""
    words = set(variant.split("+"))
    target.layers = [
        replace(layer, attention=replace(layer.attention, batch_invariant="attention" in words))
        for layer in target.layers
    ]
    for weight in (weight for layer in target.layers for weight in layer.weights):
        weight.use_batch_invariant("products" in words)
        weight.vendor_rows = PROVEN.get(id(target)) if "library" in words else None
    overlaps = "off" not in words
    dependent_launch.supports_dependent_launch = lambda _: overlaps  # type: ignore[assignment]

    def skinny_tiles(
        outputs: int, split_inputs: int, block_t: int, gated: bool
    ) -> skinny_gemm.TileSizes:
        chosen = SKINNY_TILES(outputs, split_inputs, block_t, gated)
        if "weights" not in words:
            if not gated and chosen.block_n == 64:
                chosen = chosen._replace(num_stages=4 if chosen.block_k == 128 else 6)
            return chosen._replace(early=0)
        return chosen

    plans = [word for word in words if word[0].isdigit()]
    invariant_attention.plan_attention = fixed_plan(plans[0]) if plans else plan_attention
    rotated_attention.MAX_ROWS = skinny_gemm.MAX_ROWS if "rotate" in words else 0
    tiles.ALIKE_ROWS = ALIKE_ROWS if "rows" in words else 1
    tiles.BUSY_EXPERTS = BUSY_EXPERTS if "trees" in words else ()
    norm_route.MAX_ROWS = NORM_ROUTE_ROWS if "route" in words else 0
    skinny_gemm.tile_sizes = skinny_tiles


def fixed_plan(word: str) -> Callable[..., AttentionPlan]:
    """A program for each split; the word has queries, warps and lanes."""
    queries, warps, lanes = map(int, word.split("-"))

    def plan(_: int, __: int, group: int, ___: Tensor, ____: bool) -> AttentionPlan:
        return AttentionPlan(queries // group, queries, True, warps, lanes)

    return plan


def prove_library(target: FusedLlamaTarget, row_counts: set[int]) -> None:
    """Find out for which of these numbers of rows the library gives the bits of exact mode."""
    dense = [layer.mlp for layer in target.layers if isinstance(layer.mlp, DenseMLP)]
    gated = {id(mlp.gate_up) for mlp in dense}
    weights = [weight for layer in target.layers for weight in layer.weights]
    pairs = [(w.weight, id(w) in gated) for w in weights if w.weight is not None]
    PROVEN[id(target)] = VendorRows()
    PROVEN[id(target)].prove(pairs, row_counts.intersection(ROW_COUNTS))


def build_target(
    shape: str, layers: int, experts: str | None
) -> tuple[FusedLlamaTarget, list[KVShape]]:
    config = shape_config(shape)
    config.num_hidden_layers = min(layers, config.num_hidden_layers)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    torch.manual_seed(0)
    model = random_model(config, "cuda", torch.bfloat16, parse_experts(experts, shape))
    target = Target(model, name=shape)
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    windows = {i: window if kind == "sliding_attention" else None for i, kind in enumerate(kinds)}
    fused = FusedLlamaTarget(target, 1024, windows)
    return fused, target_kv_shapes(target)


def row_pass(requests: int, rows: int, kv_cache: KVCache, context: int, tree_depth: int) -> RowPass:
    """Every request has `context` tokens and `rows` new ones: chains, or trees of some depth."""
    pages = kv_cache.num_pages // requests
    device = kv_cache.keys[0].device
    tables = torch.arange(requests * pages, dtype=torch.int32, device=device).view(requests, pages)
    positions = context + torch.arange(rows, device=device).repeat(requests)
    owners = torch.arange(requests, device=device).repeat_interleave(rows)
    slots = tables[owners, positions // PAGE_SIZE].long() * PAGE_SIZE + positions % PAGE_SIZE
    counts = torch.full((requests,), rows, dtype=torch.int32, device=device)
    starts = torch.arange(requests, dtype=torch.int32, device=device) * rows
    firsts = torch.full((requests,), context, dtype=torch.int32, device=device)
    chains = RowPass(positions, slots, tables, starts, counts, firsts, rows, PAGE_SIZE)
    return with_likely_trees(chains, tree_depth) if tree_depth else chains


def floor_us(target: FusedLlamaTarget) -> float:
    """Microseconds that reading the matrices of a layer takes, after a pass has run."""
    total = 0.0
    for i, layer in enumerate(target.layers):
        total += sum(w.weight.nbytes for w in layer.weights if w.weight is not None)
        if isinstance(layer.mlp, Mixture):
            assert target.expert_counts is not None
            touched = int(target.expert_counts[i, -1])
            total += touched * layer.mlp.expert_bytes + layer.mlp.router_weight.nbytes
    return total / BANDWIDTH * 1e6 / len(target.layers)


def capture(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def kernel_times(graph: torch.cuda.CUDAGraph, layers: int) -> list[tuple[str, float, float]]:
    """Name, launches and microseconds per layer of each kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = defaultdict(list)
    for event in profile.events():
        if event.device_time > 0:
            times[event.name[:40]].append(event.device_time)
    return [(name, len(x) / layers, sum(x) / layers) for name, x in times.items()]


def new_cache(shapes: list[KVShape], requests: int, positions: int) -> KVCache:
    """Random keys and values."""
    pages = requests * -(-positions // PAGE_SIZE)
    kv_cache = KVCache(shapes, pages, PAGE_SIZE, torch.device("cuda"))
    for cache in (*kv_cache.keys, *kv_cache.values):
        cache.normal_()
    return kv_cache


def measure(
    target: FusedLlamaTarget, passed: RowPass, kv_cache: KVCache, options: argparse.Namespace
) -> str:
    x = torch.randn(len(passed.positions), len(target.norm), device="cuda").bfloat16()
    if options.alike:
        x = x[:: passed.max_rows].repeat_interleave(passed.max_rows, 0) + x / 4
    words = []
    first: Tensor | None = None
    for name in options.variants.split(","):
        switch(name, target)
        outputs: list[Tensor] = []

        def run() -> None:
            new_pass = replace(passed, _cache={})
            outputs.append(target.run_layers(x, new_pass, kv_cache).residual)  # noqa: B023

        graph = capture(run)
        spent = 1e6 * replay_seconds(graph, 20) / len(target.layers)
        floor = floor_us(target)
        words.append(f"{name} {spent:.1f} us ({floor / spent:.0%})")
        first = outputs[-1].clone() if first is None else first
        if not torch.equal(first, outputs[-1]):
            words[-1] += f" DIFFERS {(first - outputs[-1]).abs().max():.3g}"
        if options.kernels:
            for kernel, launches, each in kernel_times(graph, len(target.layers)):
                print(f"    {name} {kernel:40} {launches:.1f} x {each:.2f} us")
    counts = target.expert_counts
    touched = "" if counts is None else f", {counts[:, -1].float().mean():.0f} experts touched"
    return ", ".join(words) + f"; floor {floor:.1f} us{touched}"


def run_shape(shape: str, options: argparse.Namespace) -> None:
    target, kv_shapes = build_target(shape, options.layers, options.experts)
    cases = []
    for words in options.rows.split(","):
        requests, rows = (int(word) for word in words.split("x"))
        kv_cache = new_cache(kv_shapes, requests, options.context + rows)
        passed = row_pass(requests, rows, kv_cache, options.context, options.tree)
        cases.append((words, passed, kv_cache))

    row_counts = {len(passed.positions) for _, passed, _ in cases}
    if "library" in options.variants and row_counts.intersection(ROW_COUNTS):
        prove_library(target, row_counts)

    def run_all() -> None:
        for (_, passed, kv_cache), variant in itertools.product(cases, options.variants.split(",")):
            switch(variant, target)
            x = torch.zeros(len(passed.positions), len(target.norm), device="cuda").bfloat16()
            target.run_layers(x, passed, kv_cache)

    compile_ahead(run_all, torch.device("cuda"))
    for words, passed, kv_cache in cases:
        if time.monotonic() < options.end:
            result = measure(target, passed, kv_cache, options)
            print(shape, options.experts or "bf16", words, result, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shapes")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rows", default="1x1,1x6,8x1,8x6")
    parser.add_argument("--experts")
    parser.add_argument("--variants", default=VARIANTS)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--tree", type=int, default=0, help="depth of trees; 0: chains")
    parser.add_argument("--alike", action="store_true", help="the rows of a request are alike")
    parser.add_argument("--seconds", type=float, default=300, help="no more cases after these")
    options = parser.parse_args()
    options.end = time.monotonic() + options.seconds
    for shape in options.shapes.split(","):
        run_shape(shape, options)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
