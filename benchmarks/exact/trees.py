"""Attention of draft trees: the exact one beside the fast one, and its bits beside chains.

    python -m benchmarks.exact.trees OUT [--seconds 60] [--context 395] [--rows 32,16]

For the heads of SmolLM2-135M and Llama-3.1-8B. `bits`: every row of trees against a chain of its
ancestors, with each plan (rows of a block, queries of a block, a program for each split, warps,
lanes of a tile); `[]` means that all are equal. `us`: microseconds of one layer with 1, 8 and 64
requests of `--rows` rows each, in CUDA graphs: the fast path, the chosen plan, other plans from
fast to slow, and the look-up of lanes, which a pass of all layers needs once. OUT/exact_trees.json
has them all.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.exact.attention import (
    HEADS,
    attend,
    chain_rows,
    chains_of_trees,
    new_caches,
    tree_rows,
)
from benchmarks.exact.attention_times import DEPTH, Pass, TimedPass
from benchmarks.exact.kernels import CACHES, DEVICE, clear_cached, compare, microseconds
from benchmarks.exact.part_report import PartReport
from benchmarks.likely_trees import with_likely_trees
from peagle.kernels.attention_params import AttentionParams
from peagle.kernels.row_pass import RowPass
from peagle.kernels.triton.batch_invariant.attention_plan import AttentionPlan, tail_sizes
from peagle.kernels.triton.batch_invariant.tree_lanes import _tree_lanes
from peagle.kernels.triton.launch.compile_ahead import compile_ahead

ROWS = 32
REQUESTS = (1, 8, 64)
FIRSTS = [0, 3, 57, 79, 396, 509, 1023]  # positions of the roots, in and across blocks and splits
# Queries of a block, a program for each split, warps, lanes of a tile.
PLANS = (
    (16, True, 4, 128),
    (16, True, 4, 64),
    (16, True, 8, 128),
    (16, True, 8, 64),
    (16, False, 4, 128),
    (32, True, 4, 128),
    (32, True, 4, 64),
    (32, True, 8, 128),
    (32, True, 8, 64),
    (32, False, 4, 64),
    (32, False, 4, 128),
    (64, True, 4, 64),
    (64, True, 8, 64),
    (64, False, 4, 64),
    (64, False, 8, 64),
)


def tree_plans(group: int) -> list[AttentionPlan]:
    return [
        AttentionPlan(queries // group, queries, parallel, warps, lanes)
        for queries, parallel, warps, lanes in PLANS
    ]


def likely_tree_rows(batch: int, nodes: int, depth: int, firsts: list[int]) -> RowPass:
    rows = with_likely_trees(chain_rows([nodes] * batch, firsts), depth)
    CACHES.append(rows._cache)
    return rows


def check_bits(report: PartReport, model: str, make_rows: Callable[..., RowPass]) -> None:
    heads, kv_heads, d = HEADS[model]
    rows = make_rows(len(FIRSTS), ROWS, DEPTH, FIRSTS)
    caches = new_caches(rows, kv_heads, d)
    query = torch.randn(len(FIRSTS) * ROWS, heads, d, device=DEVICE).bfloat16()
    params = AttentionParams(d**-0.5)
    jobs: dict[str, Callable[[], Tensor]] = {
        str(tuple(plan)): partial(attend, query, caches, rows, params, plan)
        for plan in tree_plans(heads // kv_heads)
    }
    chains = partial(chains_of_trees, query, caches, rows, params, FIRSTS, ROWS)
    name = make_rows.__name__.removesuffix("_rows")
    report.add(bits=f"{model}, {name}", differing=compare(jobs, chains))


class TimedTrees(TimedPass):
    def __init__(self, model: str, size: Pass) -> None:
        super().__init__(model, size)
        self.rows = with_likely_trees(self.rows, DEPTH)
        CACHES.append(self.rows._cache)

    def find_lanes(self) -> object:
        sizes = tail_sizes(self.rows, self.query.shape[2], self.chosen)
        assert sizes is not None
        return _tree_lanes(self.rows, sizes)

    def run_all(self) -> None:
        for plan in (None, self.chosen, *tree_plans(self.heads // self.kv_heads)):
            self.attend(self.layers[0], plan)

    def report_times(self, report: PartReport) -> None:
        times = {
            "fast": microseconds(self.runs(None)),
            "exact": microseconds(self.runs(self.chosen)),
            "lanes": microseconds([self.find_lanes] * 8),
        }
        others = {
            str(tuple(plan)): microseconds(self.runs(plan))
            for plan in tree_plans(self.heads // self.kv_heads)
        }
        by_time = dict(sorted(others.items(), key=lambda item: item[1]))
        report.add(us=self.name, chosen=str(tuple(self.chosen)), **times, **by_time)


def time_trees(report: PartReport, context: int, row_counts: list[int]) -> None:
    timed = [
        TimedTrees(model, Pass(requests, rows, context, True))
        for rows in row_counts
        for model in ("smollm2", "8b")
        for requests in REQUESTS
    ]

    def run_all() -> None:
        for each in timed:
            each.run_all()

    compile_ahead(run_all, torch.device(DEVICE))
    clear_cached()
    for each in timed:
        if report.has_time:
            each.report_times(report)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--context", type=int, default=395)
    parser.add_argument("--rows", default="32,16")
    options = parser.parse_args()
    row_counts = [int(word) for word in options.rows.split(",")]
    torch.manual_seed(0)
    report = PartReport(options.out / "exact_trees.json", options.seconds)
    report.run("times", lambda: time_trees(report, options.context, row_counts))
    for model in ("smollm2", "8b"):
        for make_rows in (likely_tree_rows, tree_rows):
            report.run("bits", partial(check_bits, report, model, make_rows))


if __name__ == "__main__":
    main()
