"""The times of exact attention beside those of the fast path, in layers with their own caches."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.exact.attention import HEADS, chain_rows, new_caches, plans, tree_rows
from benchmarks.exact.kernels import DEVICE, clear_cached, microseconds
from benchmarks.exact.part_report import PartReport
from peagle.kernels.attention_params import AttentionParams
from peagle.kernels.triton.attention.attention_plan import new_split_counters
from peagle.kernels.triton.attention.paged_attention import paged_attention
from peagle.kernels.triton.batch_invariant.attention_plan import AttentionPlan, plan_attention
from peagle.kernels.triton.batch_invariant.paged_attention import invariant_attention
from peagle.kernels.triton.launch.compile_ahead import compile_ahead

LAYERS = 4  # whose keys come from memory, as in a step
REPEATS = 3
DEPTH = 11  # of trees
TREE_PROGRAMS = ((True, 4), (True, 8), (False, 4))  # parallel, warps


class Pass(NamedTuple):
    requests: int
    rows: int  # of each
    context: int
    is_tree: bool = False


PASSES = (
    Pass(1, 1, 300),
    Pass(1, 8, 40),
    Pass(1, 8, 100),
    Pass(1, 8, 180),
    Pass(1, 8, 300),
    Pass(1, 8, 2000),
    Pass(1, 32, 300, True),
    Pass(8, 8, 300),
    Pass(8, 32, 300, True),
    Pass(64, 1, 300),
    Pass(64, 8, 300),
    Pass(64, 16, 300, True),
    Pass(64, 32, 300, True),
    Pass(4, 512, 0),
)


class TimedPass:
    def __init__(self, model: str, size: Pass) -> None:
        self.heads, self.kv_heads, d = HEADS[model]
        self.size = size
        requests, count, context, is_tree = size
        self.name = f"attention {model} {requests} x {count}{' tree' if is_tree else ''}, {context}"
        firsts = [context + 7 * b % 64 if context else 0 for b in range(requests)]
        self.rows = (
            tree_rows(requests, count, DEPTH, firsts)
            if is_tree
            else chain_rows([count] * requests, firsts)
        )
        self.layers = [new_caches(self.rows, self.kv_heads, d) for _ in range(LAYERS)]
        self.query = torch.randn(requests * count, self.heads, d, device=DEVICE).bfloat16()
        self.out = torch.empty_like(self.query)
        self.params = AttentionParams(d**-0.5)
        self.counters = new_split_counters(self.query.device)

    @property
    def chosen(self) -> AttentionPlan:
        requests, count, _, is_tree = self.size
        group = self.heads // self.kv_heads
        return plan_attention(requests * self.kv_heads, count, group, self.query, is_tree)

    def plans(self, all_plans: bool) -> dict[str, AttentionPlan]:
        """The chosen plan, and others."""
        chosen = self.chosen
        group = self.heads // self.kv_heads
        smallest = AttentionPlan(16 // group, 16, True)
        others = [smallest._replace(parallel=p, num_warps=w) for p in (True, False) for w in (4, 8)]
        if self.size.is_tree:
            counts = [rows for rows in (1, 2, 4) if rows * group <= 16]
            others = [AttentionPlan(r, 16, p, w) for r in counts for p, w in TREE_PROGRAMS]
        others.append(chosen._replace(parallel=not chosen.parallel))
        if all_plans:
            most = max(16, 2 * self.size.rows * group)
            others += [plan for plan in plans(group) if plan.block_queries <= most]
        return {"exact": chosen} | {str(tuple(plan)): plan for plan in others}

    def attend(self, caches: tuple[Tensor, Tensor], plan: AttentionPlan | None) -> Tensor:
        """None: the fast path."""
        args = (self.query, *caches, self.rows, self.params, self.out, self.counters)
        return paged_attention(*args) if plan is None else invariant_attention(*args, plan)

    def runs(self, plan: AttentionPlan | None) -> list[Callable[[], object]]:
        runs: list[Callable[[], object]] = [partial(self.attend, x, plan) for x in self.layers]
        return runs * REPEATS


def time_attention(report: PartReport, all_plans: bool = True) -> None:
    """Without `all_plans`: the chosen plan, and few others."""
    timed = [TimedPass(model, size) for model in ("smollm2", "8b") for size in PASSES]

    def run_all() -> None:
        for each in timed:
            for plan in (None, *each.plans(all_plans).values()):
                each.attend(each.layers[0], plan)

    compile_ahead(run_all, torch.device(DEVICE))
    clear_cached()
    for each in timed:
        if not report.has_time:
            return
        times = {"fast": microseconds(each.runs(None))}
        for name, plan in each.plans(all_plans).items():
            try:
                times[name] = microseconds(each.runs(plan))
            except Exception as error:
                print(each.name, name, repr(error)[:200], flush=True)
        report.add(us=each.name, chosen=str(tuple(each.chosen)), **times)
