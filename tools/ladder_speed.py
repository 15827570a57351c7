"""Tokens a second of the ladder's drafters, on the engine, with the target loaded once.

    python -m tools.ladder_speed OUT --bench bench/                   # K=7; and what the target does alone
    python -m tools.ladder_speed OUT --bench bench/ -k 7,11 --tree 32 --only p-eagle,combined

Adds to each record of OUT (tools/ladder.py) a line for each set and shape of drafts: tokens a second by concurrency,
the acceptance length the engine counted, and the time of a step at the smallest concurrency. What a record has is not
measured again.
"""

import argparse
import gc
import json
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from peagle.bench.load.engine_load import EngineLoad
from peagle.bench.load.jobs import LoadJob, make_jobs
from peagle.bench.load.step_timings import CounterSnapshot
from peagle.catalog.pair import DrafterSource
from peagle.core import Method
from peagle.data.bench import Task, read_sets
from peagle.draft_shape import NO_DRAFT, DraftShape
from peagle.drafter.formats import checkpoint
from peagle.engine import Engine, EngineConfig
from peagle.errors import UserError
from peagle.loaded import LoadedPair, load
from peagle.paths import write_json
from peagle.train.publish import device_name

FEWEST = 16  # requests of a cell


class Asked:
    """The requests of every cell, encoded once: what a Load asks of whoever drives it."""

    def __init__(self, loaded: LoadedPair, jobs: Sequence[LoadJob]) -> None:
        self.loaded, self.jobs, self.temperature = loaded, jobs, 0.0
        self.prompts: dict[Task, list[int]] = {
            job.task: loaded.encode(job.messages([])) for job in jobs
        }

    def positions(self, job: LoadJob) -> int:
        later = [self.loaded.encode(turn) for turn in job.task.turns[1:]]
        return (
            len(self.prompts[job.task])
            + sum(map(len, later))
            + len(job.task.turns) * job.max_tokens
        )

    def engine(self, method: str, shape: DraftShape, most: int) -> Engine:
        longest = max(map(self.positions, self.jobs)) + 2 * shape.nodes + 64
        context = min(longest, self.loaded.target.context)
        nodes = 0 if shape.is_chain else shape.nodes
        return Engine(
            self.loaded,
            EngineConfig(
                method=method,
                k=shape.k or "auto",
                max_batch=most,
                context=context,
                kv_tokens=context * most,
                prefix_caching=False,
                thread=False,
                tree=nodes,
            ),
        )

    def measure(self, method: str, shape: DraftShape, concurrency: Sequence[int]) -> dict[str, Any]:
        engine = self.engine(method, shape, max(concurrency))
        try:
            cells = {c: self.cell(engine, c) for c in concurrency}
        finally:
            engine.close()
        return {
            "tokens_per_second": {str(c): cell["tokens_per_second"] for c, cell in cells.items()},
            "acceptance_length": cells[max(cells)]["acceptance_length"],  # of the most requests
            "step_ms": cells[min(cells)]["step_ms"],
            "device": device_name(self.loaded.target.device),
        }

    def cell(self, engine: Engine, concurrency: int) -> dict[str, Any]:
        jobs = self.jobs[: max(FEWEST, 2 * concurrency)]
        self.drive(engine, concurrency, jobs)  # kernels are compiled, graphs captured
        if self.loaded.target.device.type == "cuda":
            torch.cuda.synchronize(self.loaded.target.device)
        before, started = CounterSnapshot(engine.metrics), time.perf_counter()
        tokens = self.drive(engine, concurrency, jobs)
        seconds, steps = (
            time.perf_counter() - started,
            CounterSnapshot(engine.metrics).minus(before),
        )
        return {
            "tokens_per_second": round(tokens / seconds, 1),
            "acceptance_length": round(1 + steps.spec.accepted / steps.spec.drafts, 4)
            if steps.spec.drafts
            else 1.0,
            "step_ms": None if steps.step_ms is None else round(steps.step_ms, 4),
        }

    def drive(self, engine: Engine, concurrency: int, jobs: Sequence[LoadJob]) -> int:
        records = EngineLoad(self.loaded, engine, self.prompts, concurrency).drive(jobs)
        if errors := [record.error for record in records if record.error]:
            raise UserError(errors[0])
        return sum(record.tokens for record in records)


def measured(
    loaded: LoadedPair, records: list[Path], shapes: list[DraftShape], options: argparse.Namespace
) -> int:
    """Every record, shape and set; how many failed."""
    begin, longest, failed = time.perf_counter(), 0.0, 0
    jobs = {
        name: make_jobs(tasks, options.max_tokens, seed=0)
        for name, tasks in tasks_of(options).items()
    }
    concurrency = [int(word) for word in options.concurrency.split(",")]
    for path, record, key in left(records, shapes, list(jobs)):
        name, shape = key
        started = time.perf_counter()
        if options.seconds and started - begin + longest > options.seconds:
            print(f"{path.stem}: no time left")
            break
        try:
            asked = Asked(with_drafter(loaded, path, record), jobs[name])
            found = {"set": name, "shape": str(shape)} | asked.measure(
                record["method"], shape, concurrency
            )
            record = json.loads(path.read_text())
            write_json(path, record | {"engine": [*record.get("engine", ()), found]})
            print(line(path.stem, found), flush=True)
        except Exception as error:  # the next one may do better
            failed += 1
            traceback.print_exc()
            print(
                f"{path.stem}: {name}: {shape}: failed: {type(error).__name__}: {error}", flush=True
            )
        longest = max(longest, time.perf_counter() - started)
        gc.collect()
        if loaded.target.device.type == "cuda":
            torch.cuda.empty_cache()
    return failed


def tasks_of(options: argparse.Namespace) -> dict[str, list[Task]]:
    return read_sets(
        [word.strip() for word in options.sets.split(",")], options.bench, options.limit
    )


def left(
    records: list[Path], shapes: list[DraftShape], sets: list[str]
) -> Iterator[tuple[Path, dict[str, Any], tuple[str, DraftShape]]]:
    """What is not measured yet; where nothing is drafted there is one shape."""
    for path in records:
        record = json.loads(path.read_text())
        known = [(one["set"], one["shape"]) for one in record.get("engine", ())]
        for shape in [NO_DRAFT] if record["method"] == "none" else shapes:
            for name in sets:
                if (name, str(shape)) not in known:
                    yield path, record, (name, shape)


def with_drafter(loaded: LoadedPair, path: Path, record: dict[str, Any]) -> LoadedPair:
    if record["method"] == "none":
        return loaded
    method: Method = record["method"]
    drafter = checkpoint.load(path.with_suffix(""), loaded.target, loaded.target.dtype)
    pair = replace(
        loaded.pair, method=method, drafters={method: DrafterSource(folder=path.with_suffix(""))}
    )
    return LoadedPair(pair, loaded.target, {method: drafter})


def line(name: str, found: dict[str, Any]) -> str:
    speeds = ", ".join(f"{speed:,.0f} at c={c}" for c, speed in found["tokens_per_second"].items())
    length = f"acceptance length {found['acceptance_length']:.2f}"
    return f"{name}: {found['set']}, {found['shape']}: {speeds} tokens/s; {length}; {found['step_ms']} ms a step"


def records_in(out: Path, only: list[str], target: str) -> list[Path]:
    """By run; the first is the target alone."""
    alone = out / "none-0.json"
    if not alone.is_file():
        label = "no drafts"
        write_json(
            alone, {"name": "none", "seed": 0, "label": label, "target": target, "method": "none"}
        )
    found = [path for path in sorted(out.glob("*-*.json")) if path.with_suffix("").is_dir()]
    return [alone, *(path for path in found if not only or path.stem.rpartition("-")[0] in only)]


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="the folder of tools/ladder.py")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--bench", type=Path, help="the folder with NAME.jsonl of the sets")
    parser.add_argument("--sets", default="humaneval")
    parser.add_argument("-k", default="7", help="chains, with commas")
    parser.add_argument("--tree", default="", help="trees of so many nodes too, with commas")
    parser.add_argument("--tree-k", type=int, default=7, help="depth of a tree")
    parser.add_argument("--concurrency", default="1,8,64")
    parser.add_argument("--limit", type=int, help="tasks")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--only", default="", help="runs by name, with commas")
    parser.add_argument(
        "--seconds", type=float, help="nothing begins that would not end within so many"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args(words)
    try:
        shapes = [DraftShape(int(k), int(k)) for k in options.k.split(",") if k]
        shapes += [
            DraftShape(options.tree_k, int(nodes)) for nodes in options.tree.split(",") if nodes
        ]
        loaded = load(options.target, device=options.device, dtype=options.dtype)
        only = [word for word in options.only.split(",") if word]
        return (
            1
            if measured(
                loaded, records_in(options.out, only, loaded.target.name or ""), shapes, options
            )
            else 0
        )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
