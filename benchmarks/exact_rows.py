"""Whether rows keep their bits in batches of any size on this GPU, and what that costs.

    python -m benchmarks.exact_rows OUT [--seconds 150] [--device cuda]

`bits`: the products and the attention of batch_invariant/, with each tile size and plan, against
rows computed alone. `times`: microseconds beside those of the fast path, in CUDA graphs. Every
result is printed at once and written to OUT/exact_rows.json. A part that fails is reported, and the
others go on.
"""

# ruff: noqa: B023 - jobs run before the next iteration
# mypy: disable-error-code="misc, arg-type, assignment, call-arg, return-value"
import argparse
import json
import random
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.cuda_graphs import replay_seconds
from peagle.engine.model.weight import Weight
from peagle.kernels.attention_params import AttentionParams
from peagle.kernels.row_pass import RowPass
from peagle.kernels.triton.attention_plan import new_split_counters
from peagle.kernels.triton.batch_invariant import gemm
from peagle.kernels.triton.batch_invariant.attention_plan import AttentionPlan, plan_attention
from peagle.kernels.triton.batch_invariant.paged_attention import invariant_attention
from peagle.kernels.triton.launch.compile_ahead import compile_ahead
from peagle.kernels.triton.paged_attention import paged_attention
from peagle.kernels.triton.skinny_gemm import (
    TileSizes,
    skinny_gemm,
)

MATRICES = {
    "smollm2 qkv": (960, 576),
    "smollm2 out": (576, 576),
    "smollm2 gate_up": (3072, 576),
    "smollm2 down": (576, 1536),
    "smollm2 lm_head": (49152, 576),
    "8b qkv": (6144, 4096),
    "8b out": (4096, 4096),
    "8b gate_up": (28672, 4096),
    "8b down": (4096, 14336),
    "8b lm_head": (128256, 4096),
}
ROW_COUNTS = (1, 2, 7, 8, 16, 64, 65, 128, 512, 2048)
TIMED_ROWS = (1, 8, 64, 128, 512, 1024, 2048)
VENDOR_ROWS = (65, 72, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1000, 1024, 1536, 2048)
CHAIN_TILES = (
    TileSizes(16, 64, 2, 8),
    TileSizes(16, 128, 2, 6),
    TileSizes(16, 128, 4, 6),
    TileSizes(32, 64, 2, 8),
    TileSizes(32, 128, 2, 6),
    TileSizes(32, 128, 4, 4),
    TileSizes(64, 128, 4, 4),
    TileSizes(64, 64, 4, 6),
)
HEADS = {"smollm2": (9, 3, 64), "8b": (32, 8, 128), "gpt-oss": (64, 8, 64)}
PAGE_SIZE = 64
DEVICE = "cuda"


class Report:
    """Prints records as they come, and keeps them in a file."""

    def __init__(self, folder: Path, deadline: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / "exact_rows.json"
        self.deadline = deadline
        self.records: list[dict[str, Any]] = []

    def add(self, **record: Any) -> None:
        self.records.append(record)
        print(json.dumps(record), flush=True)
        self.file.write_text(json.dumps(self.records, indent=1))

    def run(self, name: str, part: Callable[[], None]) -> None:
        if time.monotonic() > self.deadline:
            self.add(part=name, skipped="no time is left")
            return
        started = time.monotonic()
        try:
            part()
        except Exception as error:
            traceback.print_exc()
            self.add(part=name, failed=repr(error)[:300])
        self.add(part=name, seconds=round(time.monotonic() - started, 1))


def compare(jobs: dict[str, Callable[[], Tensor]], expected: Callable[[], Tensor]) -> list[str]:
    """Compile all jobs on several threads, run them, and name those with other bits."""
    device = torch.device(DEVICE)

    def run_all() -> None:
        for job in (expected, *jobs.values()):
            job()

    compile_ahead(run_all, device)
    clear_cached()
    right = expected()
    differing = []
    for name, job in jobs.items():
        try:
            result = job()
        except Exception as error:
            differing.append(f"{name}: {type(error).__name__} {str(error)[:80]}")
            continue
        unequal = int((result != right[: len(result)]).sum())
        if unequal:
            differing.append(f"{name}: {unequal} of {result.numel()}")
    return differing


CACHES: list[dict[Any, Any]] = []  # of passes: a dry run leaves zeros there


def clear_cached() -> None:
    for cache in CACHES:
        cache.clear()


def product_jobs(
    x: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None
) -> dict[str, Callable[[], Tensor]]:
    jobs: dict[str, Callable[[], Tensor]] = {}
    for count in [count for count in ROW_COUNTS if count <= len(x)]:
        jobs[f"{count} rows"] = lambda c=count: gemm.invariant_gemm(x[:c], weight, bias, scales)
    for tiles in (gemm.FEW_ROWS_TILES, *gemm.TILES):
        jobs[f"tiles {tile_name(tiles)}"] = lambda t=tiles: gemm.invariant_gemm(
            x, weight, bias, scales, t
        )
    for tiles in chain_choices(*weight.shape):
        jobs[f"chain {tuple(tiles)}"] = lambda t=tiles: skinny_gemm(
            x[:64], weight, bias, scales, t, splits=1
        )
    return jobs


def chain_choices(outputs: int, inputs: int) -> list[TileSizes]:
    if outputs % 64:
        return []
    return [tiles for tiles in CHAIN_TILES if inputs % tiles.block_k == 0]


def gated_jobs(x: Tensor, weight: Tensor, scales: Tensor | None) -> dict[str, Callable[[], Tensor]]:
    jobs: dict[str, Callable[[], Tensor]] = {}
    for count in [count for count in ROW_COUNTS if count <= len(x)]:
        jobs[f"{count} rows"] = lambda c=count: gemm.gated_invariant_gemm(x[:c], weight, scales)
    for tiles in (gemm.FEW_ROWS_TILES, *gemm.GATED_TILES):
        jobs[f"tiles {tile_name(tiles)}"] = lambda t=tiles: gemm.gated_invariant_gemm(
            x, weight, scales, t
        )
    return jobs


def random_matrix(n: int, k: int, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(n + k)
    x = torch.randn(rows, k, generator=generator, device=DEVICE)
    # Outliers, as hidden states have them.
    x[:, ::97] *= 30
    weight = torch.randn(n, k, generator=generator, device=DEVICE) / k**0.5
    return x.bfloat16(), weight.bfloat16()


def check_products(report: Report, rows: int) -> None:
    for name, (n, k) in MATRICES.items():
        x, weight = random_matrix(n, k, rows)
        if name.endswith("gate_up"):
            jobs = gated_jobs(x, weight, None)
            report.add(
                bits=name,
                differing=compare(jobs, lambda x=x, w=weight: gemm.gated_invariant_gemm(x, w)),
            )
            continue
        jobs = product_jobs(x, weight, None, None)
        expected = jobs.pop(f"{rows} rows")
        report.add(bits=name, differing=compare(jobs, expected))
        torch.cuda.empty_cache()


def check_variants(report: Report, rows: int) -> None:
    """Biases, 8-bit weights, and outputs that fill no tile."""
    for name, n, k, dtype in (
        ("bias", 1152, 896, torch.bfloat16),
        ("bias, splits", 3584, 3584, torch.bfloat16),
        ("int8", 4096, 4096, torch.int8),
        ("fp8", 4096, 4096, torch.float8_e4m3fn),
        ("int8 gated", 8192, 4096, torch.int8),
        ("odd outputs", 1000, 576, torch.bfloat16),
    ):
        x, weight = random_matrix(n, k, rows)
        scales = None
        if dtype != torch.bfloat16:
            weight = (weight.float() * 60 * k**0.5 / 3).clamp(-120, 120).to(dtype)
            scales = torch.rand(n, device=DEVICE) + 0.5
        if name.endswith("gated"):
            jobs = gated_jobs(x, weight, scales)
            expected = lambda x=x, w=weight, s=scales: gemm.gated_invariant_gemm(x, w, s)  # noqa: E731
        else:
            bias = torch.randn(n, device=DEVICE).bfloat16() if n != 1000 else None
            jobs = product_jobs(x, weight, bias, scales)
            expected = jobs.pop(f"{rows} rows")
        report.add(bits=name, differing=compare(jobs, expected))


def check_vendor(report: Report) -> None:
    """For which numbers of rows the vendor's library gives the same bits."""
    for name, (n, k) in MATRICES.items():
        x, weight = random_matrix(n, k, max(VENDOR_ROWS))
        expected = gemm.invariant_gemm(x, weight)
        differing = [
            rows
            for rows in VENDOR_ROWS
            if not torch.equal(torch.nn.functional.linear(x[:rows], weight), expected[:rows])
        ]
        report.add(vendor=name, differing_rows=differing)


# --- attention --------------------------------------------------------------------------------


def chain_rows(counts: list[int], firsts: list[int], pages: int = 0) -> RowPass:
    """Rows of chains; request b has the pages b * pages .. of the cache, in a random order."""
    pages = pages or max(-(-(f + c) // PAGE_SIZE) for f, c in zip(firsts, counts, strict=True))
    batch = len(counts)
    order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(1))
    tables = order.view(batch, pages).int()
    numbers = torch.tensor(counts)
    owner = torch.arange(batch).repeat_interleave(numbers)
    starts = numbers.cumsum(0) - numbers
    positions = torch.tensor(firsts)[owner] + torch.arange(len(owner)) - starts[owner]
    slots = tables[owner, positions // PAGE_SIZE].long() * PAGE_SIZE + positions % PAGE_SIZE
    small = (starts, numbers, torch.tensor(firsts))
    return RowPass(
        positions.to(DEVICE),
        slots.to(DEVICE),
        tables.to(DEVICE),
        *(x.to(DEVICE, torch.int32) for x in small),
        max(counts),
        PAGE_SIZE,
    )


def tree_rows(batch: int, nodes: int, depth: int, firsts: list[int]) -> RowPass:
    """Random trees of `nodes` rows each, no deeper than `depth`."""
    rows = chain_rows([nodes] * batch, firsts)
    rng = random.Random(nodes)
    masks: list[int] = []
    depths: list[int] = []
    for _ in range(batch):
        own_masks, own_depths = [1], [0]
        for row in range(1, nodes):
            parent = rng.choice([i for i in range(row) if own_depths[i] < depth])
            own_masks.append(own_masks[parent] | 1 << row)
            own_depths.append(own_depths[parent] + 1)
        masks += own_masks
        depths += own_depths
    rows.tree_masks = torch.tensor(masks, device=DEVICE)
    first = torch.tensor(firsts).repeat_interleave(nodes).to(DEVICE)
    rows.positions = first + torch.tensor(depths, device=DEVICE)
    rows.tree_depth = depth
    CACHES.append(rows._cache)
    return rows


def new_caches(rows: RowPass, kv_heads: int, d: int) -> tuple[Tensor, Tensor]:
    slots = rows.page_tables.numel() * rows.page_size
    generator = torch.Generator(DEVICE).manual_seed(d)
    shape = (2, slots, kv_heads, d)
    caches = torch.randn(shape, generator=generator, device=DEVICE).bfloat16()
    return caches[0], caches[1]


def attend(
    query: Tensor,
    caches: tuple[Tensor, Tensor],
    rows: RowPass,
    params: AttentionParams,
    plan: AttentionPlan | None = None,
) -> Tensor:
    return invariant_attention(query, *caches, rows, params, torch.empty_like(query), plan=plan)


def plans(group: int) -> list[AttentionPlan]:
    smallest = max(16, 1 << (group - 1).bit_length())
    sizes = [(16, 8), (16, 4), (32, 8), (32, 4), (64, 4), (64, 8)]
    return [
        AttentionPlan(queries // group, queries, parallel, warps)
        for queries, warps in sizes
        for parallel in (False, True)
        if queries >= smallest
    ]


def check_chains(report: Report) -> None:
    rng = random.Random(0)
    counts = [1, 8, 8, 16, 100, 3, 1, 12]
    firsts = [rng.randrange(0, 1500) for _ in counts]
    for name, (heads, kv_heads, d) in HEADS.items():
        rows = chain_rows(counts, firsts)
        caches = new_caches(rows, kv_heads, d)
        query = torch.randn(sum(counts), heads, d, device=DEVICE).bfloat16()
        is_oss = name == "gpt-oss"
        sinks = torch.randn(heads, device=DEVICE).bfloat16() if is_oss else None
        params = AttentionParams(d**-0.5, 128 if is_oss else None, sinks=sinks)
        jobs = {
            str(tuple(plan)): lambda p=plan: attend(query, caches, rows, params, p)
            for plan in plans(heads // kv_heads)
        }

        def alone() -> Tensor:
            results = []
            position = rows.positions.int()
            for i, b in enumerate(
                torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
            ):
                one = torch.ones(1, dtype=torch.int32, device=DEVICE)
                row = RowPass(
                    rows.positions[i : i + 1],
                    rows.kv_slots[i : i + 1],
                    rows.page_tables[b : b + 1],
                    one * 0,
                    one,
                    position[i : i + 1],
                    1,
                    PAGE_SIZE,
                )
                results.append(attend(query[i : i + 1], caches, row, params))
            return torch.cat(results)

        report.add(bits=f"attention, chains, {name}", differing=compare(jobs, alone))


def check_trees(report: Report) -> None:
    """Rows of trees against chains over their ancestors."""
    for name, (heads, kv_heads, d) in HEADS.items():
        firsts = [0, 3, 57, 64, 123, 700, 1023]
        nodes = 32
        rows = tree_rows(len(firsts), nodes, 11, firsts)
        caches = new_caches(rows, kv_heads, d)
        query = torch.randn(len(firsts) * nodes, heads, d, device=DEVICE).bfloat16()
        params = AttentionParams(d**-0.5)
        jobs = {
            str(tuple(plan)): lambda p=plan: attend(query, caches, rows, params, p)
            for plan in plans(heads // kv_heads)
        }
        result = lambda: chains_of_trees(query, caches, rows, params, firsts, nodes)  # noqa: E731
        report.add(bits=f"attention, trees, {name}", differing=compare(jobs, result))


def chains_of_trees(
    query: Tensor,
    caches: tuple[Tensor, Tensor],
    rows: RowPass,
    params: AttentionParams,
    firsts: list[int],
    nodes: int,
) -> Tensor:
    """Every row of a tree as the last row of a chain of its ancestors, at their positions."""
    assert rows.tree_masks is not None
    results = []
    table = rows.page_tables.cpu()
    for i, mask in enumerate(rows.tree_masks.tolist()):
        b = i // nodes
        path = [row for row in range(nodes) if mask >> row & 1]
        places = torch.tensor([firsts[b] + row for row in path])
        chain = torch.arange(firsts[b], firsts[b] + len(path))
        old, new = (
            (table[b, x // PAGE_SIZE].long() * PAGE_SIZE + x % PAGE_SIZE).to(DEVICE)
            for x in (places, chain)
        )
        moved = tuple(cache.clone() for cache in caches)
        for cache, source in zip(moved, caches, strict=True):
            cache[new] = source[old]
        chain_pass = chain_rows([len(path)], [firsts[b]], rows.page_tables.shape[1])
        chain_pass.page_tables = rows.page_tables[b : b + 1]
        own = query[[b * nodes + row for row in path]]
        results.append(attend(own, (moved[0], moved[1]), chain_pass, params)[-1:])
    return torch.cat(results)


# --- times ------------------------------------------------------------------------------------


def microseconds(runs: list[Callable[[], object]]) -> float:
    """The mean time of one of several runs, in one CUDA graph."""
    for run in runs[:2]:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    return round(1e6 * replay_seconds(graph, 5) / len(runs), 2)


def time_products(report: Report, names: list[str]) -> None:
    for name in names:
        n, k = MATRICES[name]
        copies = max(2, min(30, (200 << 20) // (2 * n * k)))
        x, weight = random_matrix(n, k, max(TIMED_ROWS))
        weights = [weight.clone() for _ in range(copies)]
        wrapped = [Weight(w) for w in weights]
        for rows in TIMED_ROWS:
            if name.endswith("lm_head") and rows > 1024:
                continue
            few = x[:rows]
            variants = product_variants(name, rows)
            compile_ahead(
                lambda: [run(few, weight) for run in variants.values()],
                torch.device(DEVICE),
            )
            times = {"fast": microseconds([fast_product(name, few, w) for w in wrapped])}
            for key, run in variants.items():
                try:
                    times[key] = microseconds([lambda w=w, r=run: r(few, w) for w in weights])
                except Exception as error:
                    print(name, key, repr(error)[:200], flush=True)
            report.add(us=name, rows=rows, **times)
        torch.cuda.empty_cache()


def fast_product(name: str, x: Tensor, weight: Weight) -> Callable[[], Tensor]:
    if name.endswith("gate_up"):
        return lambda: weight.gated(x)
    return lambda: weight(x) if name.endswith("lm_head") else weight.split_k(x)


def product_variants(name: str, rows: int) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    variants: dict[str, Callable[[Tensor, Tensor], Tensor]] = {}
    is_gated = name.endswith("gate_up")
    if is_gated:
        variants["exact"] = gemm.gated_invariant_gemm
        choices = gemm.GATED_TILES if rows > 64 else ()
        for tiles in choices:
            variants[tile_name(tiles)] = lambda x, w, t=tiles: gemm.gated_invariant_gemm(
                x, w, None, t
            )
        return variants
    variants["exact"] = gemm.invariant_gemm
    for tiles in gemm.TILES if rows > 64 else ():
        variants[tile_name(tiles)] = lambda x, w, t=tiles: gemm.invariant_gemm(x, w, tiles=t)
    if rows <= 64 and not name.endswith("lm_head"):
        for tiles in chain_choices(*MATRICES[name]):
            variants[str(tuple(tiles))] = lambda x, w, t=tiles: skinny_gemm(x, w, None, None, t, 1)
    return variants


def tile_name(tiles: gemm.GemmTiles) -> str:
    return f"{tiles.block_n}x{tiles.block_t}x{tiles.block_k}w{tiles.num_warps}s{tiles.num_stages}"


def time_attention(report: Report) -> None:
    """Layers with caches of their own, so that keys come from memory as in a step."""
    cases: list[tuple[str, int, int, int, bool]] = [
        # name, batch, rows, context, tree
        ("1 x 1", 1, 1, 300, False),
        ("1 x 8", 1, 8, 300, False),
        ("1 x 8, 2000", 1, 8, 2000, False),
        ("1 x 32 tree", 1, 32, 300, True),
        ("8 x 8", 8, 8, 300, False),
        ("8 x 32 tree", 8, 32, 300, True),
        ("64 x 1", 64, 1, 300, False),
        ("64 x 8", 64, 8, 300, False),
        ("64 x 16 tree", 64, 16, 300, True),
        ("64 x 32 tree", 64, 32, 300, True),
        ("prefill 4 x 512", 4, 512, 0, False),
    ]
    for model in ("smollm2", "8b"):
        heads, kv_heads, d = HEADS[model]
        for name, batch, count, context, tree in cases:
            if time.monotonic() > report.deadline:
                return
            firsts = [context + 7 * b % 64 for b in range(batch)] if context else [0] * batch
            rows = (
                tree_rows(batch, count, 11, firsts) if tree else chain_rows([count] * batch, firsts)
            )
            layers = [new_caches(rows, kv_heads, d) for _ in range(4)]
            query = torch.randn(batch * count, heads, d, device=DEVICE).bfloat16()
            out = torch.empty_like(query)
            params = AttentionParams(d**-0.5)
            counters = new_split_counters(query.device)
            chosen = plan_attention(batch * kv_heads, count, heads // kv_heads, query, tree)
            variants: dict[str, AttentionPlan | None] = {"exact": None}
            for plan in plans(heads // kv_heads):
                if plan.block_queries <= max(16, 2 * count * heads // kv_heads):
                    variants[str(tuple(plan))] = plan

            def run_variant(
                plan: AttentionPlan | None,
                layers: list[tuple[Tensor, Tensor]] = layers,
                query: Tensor = query,
                out: Tensor = out,
                rows: RowPass = rows,
                params: AttentionParams = params,
                counters: Tensor = counters,
            ) -> list[Callable[[], object]]:
                return [
                    lambda c=c: invariant_attention(query, *c, rows, params, out, counters, plan)
                    for c in layers
                ] * 3

            fast = [
                lambda c=c: paged_attention(query, *c, rows, params, out, counters) for c in layers
            ] * 3
            compile_ahead(
                lambda: [run_variant(plan)[0]() for plan in variants.values()] + [fast[0]()],
                torch.device(DEVICE),
            )
            clear_cached()
            times = {"fast": microseconds(fast)}
            for key, plan in variants.items():
                try:
                    times[key] = microseconds(run_variant(plan))
                except Exception as error:
                    print(key, repr(error)[:200], flush=True)
            report.add(us=f"attention {model} {name}", chosen=str(tuple(chosen)), **times)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--parts", default="")
    options = parser.parse_args()
    torch.manual_seed(0)
    report = Report(options.out, time.monotonic() + options.seconds)
    rows = max(ROW_COUNTS)
    smollm2 = [name for name in MATRICES if name.startswith("smollm2")]
    eight_b = [name for name in MATRICES if name.startswith("8b")]
    parts: dict[str, Callable[[], None]] = {
        "chains": lambda: check_chains(report),
        "trees": lambda: check_trees(report),
        "attention times": lambda: time_attention(report),
        "vendor": lambda: check_vendor(report),
        "products": lambda: check_products(report, rows),
        "8b times": lambda: time_products(report, eight_b),
        "smollm2 times": lambda: time_products(report, smollm2),
        "variants": lambda: check_variants(report, 512),
    }
    wanted = options.parts.split(",") if options.parts else list(parts)
    for name in wanted:
        report.run(name, parts[name])
    print_summary(report)


def print_summary(report: Report) -> None:
    print("\n== bits")
    for record in report.records:
        if "bits" in record:
            print(f"{record['bits']:40} {'; '.join(record['differing']) or 'all equal'}"[:400])
    print("\n== microseconds")
    for record in report.records:
        if "vendor" in record:
            print(record)
        if "us" in record:
            rest = {k: v for k, v in record.items() if k != "us"}
            print(f"{record['us']:28} {rest}")


if __name__ == "__main__":
    main()
