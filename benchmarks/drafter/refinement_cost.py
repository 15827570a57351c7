"""What the passes of a refinement cost the engine, without training one.

    python -m benchmarks.drafter.refinement_cost --out OUT --levels 1,8,64

The drafter of the pair gets an untrained refinement of 0, 1 and 2 passes. It changes no draft, so
all rows accept the same and differ by the time of the passes alone: a trained refinement pays off
where its acceptance length grows by more than the tokens per second shrink here.
"""

import argparse
import copy
import time
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.engine.load import run_level
from peagle.drafter import Drafter
from peagle.drafter.config import MAX_REFINEMENT
from peagle.drafter.refinement import Refinement
from peagle.engine import Engine, EngineConfig
from peagle.loaded import LoadedPair, load
from peagle.paths import write_json

PROMPTS = [
    "Write a Python function that reverses a string.",
    "Explain recursion to a child.",
    "List five fruits and a meal for each of them.",
    "Write a SQL query that counts the users of each country.",
]


def with_refinement(drafter: Drafter, passes: int) -> Drafter:
    """The same drafter with an untrained refinement."""
    if not passes:
        return drafter
    refined = copy.copy(drafter)
    refined._modules = dict(drafter._modules)
    refined.config = replace(drafter.config, refinement=passes)
    layer = Refinement(refined.config).requires_grad_(False)
    refined.refinement = layer.to(drafter.norm.weight.device, drafter.dtype)
    return refined


def measure(
    pair: LoadedPair, passes: int, streams: int, options: argparse.Namespace
) -> dict[str, float]:
    drafter = with_refinement(pair.drafter("p-eagle"), passes)
    one = LoadedPair(pair.pair, pair.target, {"p-eagle": drafter})
    config = EngineConfig(
        method="p-eagle",
        k=options.k,
        tree=options.tree,
        max_batch=streams,
        exact=False,  # Without kernels for it, only chains would be exact.
        thread=False,
    )
    ids = [pair.encode(prompt) for prompt in PROMPTS]
    count = max(2 * streams, len(ids))
    prompts = [ids[i % len(ids)] for i in range(count)]
    with Engine(one, config) as engine:
        run_level(engine, prompts[:streams], options.tokens, streams)  # captures graphs
        before = engine.metrics.steps
        level = run_level(engine, prompts, options.tokens, streams)
        steps = engine.metrics.steps - before
        return level | {
            "passes": passes,
            "ms_per_step": round(1000 * level["seconds"] / steps, 3),
            "acceptance_length": round(engine.metrics.acceptance_length, 3),
        }


def table(records: list[dict[str, float]]) -> str:
    lines = [
        "| streams | passes | tokens/s | of 0 passes | ms a step | CPU seconds | acceptance |",
        "|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for record in records:
        [plain] = [x for x in records if x["streams"] == record["streams"] and not x["passes"]]
        share = record["tokens_per_second"] / plain["tokens_per_second"]
        lines.append(
            f"| {record['streams']} | {record['passes']} | {record['tokens_per_second']:,} |"
            f" {share:.1%} | {record['ms_per_step']} | {record['cpu_seconds']} |"
            f" {record['acceptance_length']} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pair", default="smollm2-135m")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--levels", default="1,8,64", help="requests at once")
    parser.add_argument("-k", type=int, default=7)
    parser.add_argument("--tree", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--seconds", type=float, default=150.0, help="no level starts after these")
    options = parser.parse_args()
    started = time.perf_counter()
    pair = load(options.pair)
    records: list[dict[str, float]] = []
    for streams in map(int, options.levels.split(",")):
        if time.perf_counter() - started > options.seconds:
            print(f"no time left for {streams} streams")
            break
        for passes in range(MAX_REFINEMENT + 1):
            records.append(measure(pair, passes, streams, options))
        options.out.mkdir(parents=True, exist_ok=True)
        write_json(options.out / "refinement_cost.json", records)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{options.pair}, {device}, K={options.k}, {time.perf_counter() - started:.0f} s")
    print(table(records))


if __name__ == "__main__":
    main()
