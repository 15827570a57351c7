"""Tokens per second of the ladder's drafters in the engine, with the target loaded once.

    python -m tools.ladder_speed OUT --bench bench/                   # K=7, and no drafts
    python -m tools.ladder_speed OUT --bench bench/ -k 7,11 --tree 32 --only p-eagle,combined

Adds to each record of OUT (tools/ladder.py) an entry for each set and draft shape: tokens per
second by concurrency, the acceptance length that the engine counted, and the time of a step at the
smallest concurrency. Existing entries are not measured again.
"""

import argparse
import gc
import json
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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

MIN_REQUESTS = 16  # at each concurrency


@dataclass(frozen=True, slots=True)
class SpeedCell:
    """The speed at one concurrency."""

    tokens_per_second: float
    acceptance_length: float
    step_ms: float | None


class SpeedBench:
    """The requests of one set, encoded once."""

    def __init__(self, loaded: LoadedPair, jobs: Sequence[LoadJob]) -> None:
        self.loaded = loaded
        self.jobs = jobs
        self.prompts: dict[Task, list[int]] = {
            job.task: loaded.encode(job.messages([])) for job in jobs
        }

    def positions(self, job: LoadJob) -> int:
        """The largest number of positions that a job needs."""
        later_turns = [self.loaded.encode(turn) for turn in job.task.turns[1:]]
        prompt_tokens = len(self.prompts[job.task]) + sum(map(len, later_turns))
        return prompt_tokens + len(job.task.turns) * job.max_tokens

    def new_engine(self, method: str, shape: DraftShape, max_batch: int) -> Engine:
        longest = max(map(self.positions, self.jobs)) + 2 * shape.nodes + 64
        context = min(longest, self.loaded.target.context)
        nodes = 0 if shape.is_chain else shape.nodes
        return Engine(
            self.loaded,
            EngineConfig(
                method=method,
                k=shape.k or "auto",
                max_batch=max_batch,
                context=context,
                kv_tokens=context * max_batch,
                exact=False,  # as in the records
                prefix_caching=False,
                thread=False,
                tree=nodes,
            ),
        )

    def measure(self, method: str, shape: DraftShape, concurrency: Sequence[int]) -> dict[str, Any]:
        engine = self.new_engine(method, shape, max(concurrency))
        try:
            cells = {c: self.measure_cell(engine, c) for c in concurrency}
        finally:
            engine.close()
        return {
            "tokens_per_second": {str(c): cell.tokens_per_second for c, cell in cells.items()},
            # The largest concurrency has the most requests.
            "acceptance_length": cells[max(cells)].acceptance_length,
            "step_ms": cells[min(cells)].step_ms,
            "device": device_name(self.loaded.target.device),
        }

    def measure_cell(self, engine: Engine, concurrency: int) -> SpeedCell:
        jobs = self.jobs[: max(MIN_REQUESTS, 2 * concurrency)]
        self.drive(engine, concurrency, jobs)  # Compiles kernels and captures graphs.
        if self.loaded.target.device.type == "cuda":
            torch.cuda.synchronize(self.loaded.target.device)
        before = CounterSnapshot(engine.metrics)
        started = time.perf_counter()
        tokens = self.drive(engine, concurrency, jobs)
        seconds = time.perf_counter() - started
        steps = CounterSnapshot(engine.metrics).minus(before)
        spec = steps.spec
        return SpeedCell(
            tokens_per_second=round(tokens / seconds, 1),
            acceptance_length=round(1 + spec.accepted / spec.drafts, 4) if spec.drafts else 1.0,
            step_ms=None if steps.step_ms is None else round(steps.step_ms, 4),
        )

    def drive(self, engine: Engine, concurrency: int, jobs: Sequence[LoadJob]) -> int:
        """Run the jobs and return the number of generated tokens."""
        records = EngineLoad(self.loaded, engine, self.prompts, concurrency).drive(jobs)
        if errors := [record.error for record in records if record.error]:
            raise UserError(errors[0])
        return sum(record.tokens for record in records)


def measure_records(
    loaded: LoadedPair, records: list[Path], shapes: list[DraftShape], options: argparse.Namespace
) -> int:
    """Measure every record, shape and set; return the number of failures."""
    started = time.perf_counter()
    longest = 0.0
    failed = 0
    sets = [word.strip() for word in options.sets.split(",")]
    jobs = {
        name: make_jobs(tasks, options.max_tokens, seed=0)
        for name, tasks in read_sets(sets, options.bench, options.limit).items()
    }
    concurrency = [int(word) for word in options.concurrency.split(",")]
    for path, record, name, shape in unmeasured(records, shapes, list(jobs)):
        cell_started = time.perf_counter()
        if options.seconds and cell_started - started + longest > options.seconds:
            print(f"{path.stem}: no time left")
            break
        try:
            bench = SpeedBench(with_drafter(loaded, path, record), jobs[name])
            speeds = bench.measure(record["method"], shape, concurrency)
            entry = {"set": name, "shape": str(shape)} | speeds
            record = json.loads(path.read_text())
            write_json(path, record | {"engine": [*record.get("engine", ()), entry]})
            print(summary_line(path.stem, entry), flush=True)
        except Exception as error:  # The other measurements continue.
            failed += 1
            traceback.print_exc()
            print(
                f"{path.stem}: {name}: {shape}: failed: {type(error).__name__}: {error}", flush=True
            )
        longest = max(longest, time.perf_counter() - cell_started)
        gc.collect()
        if loaded.target.device.type == "cuda":
            torch.cuda.empty_cache()
    return failed


def unmeasured(
    records: list[Path], shapes: list[DraftShape], sets: list[str]
) -> Iterator[tuple[Path, dict[str, Any], str, DraftShape]]:
    """(file, record, set, shape) without an entry yet; without drafts there is one shape."""
    for path in records:
        record = json.loads(path.read_text())
        known = [(entry["set"], entry["shape"]) for entry in record.get("engine", ())]
        for shape in [NO_DRAFT] if record["method"] == "none" else shapes:
            for name in sets:
                if (name, str(shape)) not in known:
                    yield path, record, name, shape


def with_drafter(loaded: LoadedPair, path: Path, record: dict[str, Any]) -> LoadedPair:
    if record["method"] == "none":
        return loaded
    method: Method = record["method"]
    drafter = checkpoint.load(path.with_suffix(""), loaded.target, loaded.target.dtype)
    pair = replace(
        loaded.pair, method=method, drafters={method: DrafterSource(folder=path.with_suffix(""))}
    )
    return LoadedPair(pair, loaded.target, {method: drafter})


def summary_line(name: str, entry: dict[str, Any]) -> str:
    speeds = ", ".join(f"{speed:,.0f} at c={c}" for c, speed in entry["tokens_per_second"].items())
    length = f"acceptance length {entry['acceptance_length']:.2f}"
    step = f"{entry['step_ms']} ms a step"
    return f"{name}: {entry['set']}, {entry['shape']}: {speeds} tokens/s; {length}; {step}"


def find_records(out: Path, only: list[str], target: str) -> list[Path]:
    """The records of the runs; the first is the target without drafts."""
    alone = out / "none-0.json"
    if not alone.is_file():
        label = "no drafts"
        write_json(
            alone, {"name": "none", "seed": 0, "label": label, "target": target, "method": "none"}
        )
    runs = [path for path in sorted(out.glob("*-*.json")) if path.with_suffix("").is_dir()]
    return [alone, *(path for path in runs if not only or path.stem.rpartition("-")[0] in only)]


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="folder of tools/ladder.py")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--bench", type=Path, help="folder with NAME.jsonl of each set")
    parser.add_argument("--sets", default="humaneval")
    parser.add_argument("-k", default="7", help="K of chains, separated by commas")
    parser.add_argument("--tree", default="", help="nodes of trees, separated by commas")
    parser.add_argument("--tree-k", type=int, default=7, help="depth of a tree")
    parser.add_argument("--concurrency", default="1,8,64")
    parser.add_argument("--limit", type=int, help="number of tasks of a set")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--only", default="", help="names of runs, separated by commas")
    parser.add_argument(
        "--seconds", type=float, help="time limit; no measurement begins that would exceed it"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    options = parse_arguments(words)
    try:
        shapes = [DraftShape(int(k), int(k)) for k in options.k.split(",") if k]
        shapes += [
            DraftShape(options.tree_k, int(nodes)) for nodes in options.tree.split(",") if nodes
        ]
        loaded = load(options.target, device=options.device, dtype=options.dtype)
        only = [word for word in options.only.split(",") if word]
        records = find_records(options.out, only, loaded.target.name or "")
        return 1 if measure_records(loaded, records, shapes, options) else 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
