"""Variants of exact attention beside the chosen plan and the fast path: microseconds and bits.

    python -m benchmarks.exact.variants OUT [--seconds 60] [--context 395] [--models smollm2]
        [--passes 1x1,1x8,8x32t,64x32t] [--rounds 3]

A pass is requests x rows of each, `t` for trees. Variants change the chosen plan (AttentionPlan):

    page    one page is looked up for a block of keys
    early   the values of the first block of a parallel split are loaded with its keys
    s1, s3  stages of loops; s1: they load nothing ahead
    w4, w8  warps
    even    programs for all splits, whose blocks have about as many rows
    r168    so few registers that three programs of 128 threads share a multiprocessor; r128: four

`us` is the median over rounds in which all variants take turns. `differing` names those with other
bits than the chosen plan: it must be empty. OUT/exact_variants.json has them all.
"""

import argparse
import statistics
from pathlib import Path

import torch

from benchmarks.exact.attention_times import Pass, TimedPass
from benchmarks.exact.kernels import DEVICE, clear_cached, microseconds
from benchmarks.exact.part_report import PartReport
from benchmarks.exact.trees import TimedTrees
from peagle.kernels.triton.batch_invariant.attention_plan import AttentionPlan, even_rows
from peagle.kernels.triton.launch.compile_ahead import compile_ahead

REGISTERS_OF_3 = 168  # of a thread, for three programs of 4 warps on a multiprocessor
REGISTERS_OF_4 = 128


def parse_pass(word: str, context: int) -> Pass:
    requests, rows = word.removesuffix("t").split("x")
    return Pass(int(requests), int(rows), context, word.endswith("t"))


def variants(chosen: AttentionPlan, size: Pass, group: int) -> dict[str, AttentionPlan]:
    plain = chosen._replace(one_page=False, early_values=False, num_stages=0, max_registers=0)
    early = plain._replace(early_values=True)
    both = early._replace(one_page=True)
    other = {8: 4, 4: 8}[chosen.num_warps]
    own = {
        "plain": plain,
        "page": plain._replace(one_page=True),
        "early": early,
        "early page": both,
        "early page s1": both._replace(num_stages=1),
        f"early page w{other}": both._replace(num_warps=other),
    }
    if size.is_tree:
        for queries in (16, 32, 64):
            own |= plans_of_all_splits(size.rows, queries, group)
    return own


def plans_of_all_splits(max_rows: int, queries: int, group: int) -> dict[str, AttentionPlan]:
    """Programs that run over all splits of a tree's keys."""
    even = AttentionPlan(even_rows(max_rows, queries // group), queries, False, 4, 64)
    limit = REGISTERS_OF_3 if queries == 64 else REGISTERS_OF_4
    return {
        f"{queries} even": even,
        f"{queries} even page": even._replace(one_page=True),
        f"{queries} even r{limit}": even._replace(max_registers=limit),
        f"{queries} even page r{limit}": even._replace(one_page=True, max_registers=limit),
    }


class TimedVariants:
    def __init__(self, model: str, size: Pass) -> None:
        self.timed = (TimedTrees if size.is_tree else TimedPass)(model, size)
        chosen = self.timed.chosen
        others = variants(chosen, size, self.timed.heads // self.timed.kv_heads)
        self.plans: dict[str, AttentionPlan | None] = {"fast": None, "exact": chosen, **others}

    def run_all(self) -> None:
        for plan in self.plans.values():
            self.timed.attend(self.timed.layers[0], plan)

    def differing(self) -> list[str]:
        """The variants whose bits are not those of the chosen plan."""
        self.run_all()  # Attention reads the lanes of a tree before the kernel in front has ended.
        torch.cuda.synchronize()
        results: dict[str, torch.Tensor] = {}
        for name, plan in self.plans.items():
            if plan is not None:
                self.timed.attend(self.timed.layers[0], plan)
                results[name] = self.timed.out.clone()
        return [name for name, result in results.items() if not result.equal(results["exact"])]

    def times(self, rounds: int) -> dict[str, float]:
        """From fast to slow."""
        each: dict[str, list[float]] = {name: [] for name in self.plans}
        for _ in range(rounds):
            for name, plan in self.plans.items():
                each[name].append(microseconds(self.timed.runs(plan)))
        medians = {name: statistics.median(values) for name, values in each.items()}
        return dict(sorted(medians.items(), key=lambda item: item[1]))


def measure_variants(report: PartReport, timed: list[TimedVariants], rounds: int) -> None:
    def run_all() -> None:
        for each in timed:
            each.run_all()

    compile_ahead(run_all, torch.device(DEVICE))
    clear_cached()
    for each in timed:
        if report.has_time:
            chosen = str(tuple(each.timed.chosen))
            differing = each.differing()
            times = each.times(rounds)
            report.add(pass_=each.timed.name, chosen=chosen, differing=differing, us=times)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--context", type=int, default=395)
    parser.add_argument("--models", default="smollm2")
    parser.add_argument("--passes", default="64x32t,8x32t,1x32t,1x16t,1x1,1x8,64x8")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.manual_seed(0)
    report = PartReport(options.out / "exact_variants.json", options.seconds)
    timed = [
        TimedVariants(model, parse_pass(word, options.context))
        for model in options.models.split(",")
        for word in options.passes.split(",")
    ]
    report.run("variants", lambda: measure_variants(report, timed, options.rounds))
    for record in report.records:
        if "us" in record:
            print(record["pass_"], "differing:", record["differing"] or "none")
            print("   ", ", ".join(f"{name} {us:.2f}" for name, us in record["us"].items()))


if __name__ == "__main__":
    main()
