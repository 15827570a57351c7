"""The ladder: train and measure drafters in turn, with one target and one feature cache.

    python -m tools.ladder --data answers/ --bench bench/ --out OUT --steps 1200
    python -m tools.ladder ... --only combined --set loss=tvmix --set mix=0.95

Each run leaves OUT/NAME-SEED (the drafter, int8) and OUT/NAME-SEED.json (its record); a run with a
record is not repeated. Acceptance lengths are replayed on the target's own greedy answers
(train/evaluation/replay.py).
"""

import argparse
import gc
import pickle
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from peagle.core import Step
from peagle.data.bench import read_sets
from peagle.draft_shape import DraftShape
from peagle.drafter.formats import checkpoint, compact
from peagle.drafter.formats.row_format import INT8
from peagle.errors import UserError
from peagle.evaluate.evaluate import summarize
from peagle.model_pair import choose_device
from peagle.paths import write_bytes, write_json
from peagle.train.config import TrainConfig, read_config
from peagle.train.data.documents import Documents, join_documents
from peagle.train.evaluation.benchmark_answers import answer_tasks
from peagle.train.objective.passes import DrafterPasses
from peagle.train.publish import device_name
from peagle.train.records import StepRecord
from peagle.train.run import TrainRun, load_teacher

LADDER_FILE = (
    Path(__file__).resolve().parents[1] / "docs" / "results" / "comparison" / "ladder.toml"
)
KS = (3, 5, 7, 11)
TREE_SHAPES = (DraftShape(7, 15), DraftShape(7, 31), DraftShape(11, 31))
NEVER = 1 << 30  # an interval, in steps, that no run reaches

Answers = dict[tuple[str, float], Documents]  # by set and temperature; --answers pickles it


@dataclass(frozen=True, slots=True)
class Rung:
    name: str
    label: str
    settings: dict[str, Any]  # config keys that differ from the base
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.name}-{self.seed}"


@dataclass(frozen=True, slots=True)
class Ladder:
    base: dict[str, Any]
    rungs: tuple[Rung, ...]

    def config(self, rung: Rung, out: Path, scratch: Path) -> TrainConfig:
        settings = self.base | rung.settings | {"seed": rung.seed, "out": str(scratch)}
        if str(settings.get("init", "")).startswith("OUT/"):
            settings["init"] = str(out / str(settings["init"]).removeprefix("OUT/"))
        return read_config(None, settings)

    @property
    def taps(self) -> tuple[int, ...]:
        """The taps of all runs together: one feature cache serves them."""
        settings = (self.base, *(rung.settings for rung in self.rungs))
        values = [keys.get("aux_layer_ids", ()) for keys in settings]
        parsed = [read_config(None, {"aux_layer_ids": ids}).aux_layer_ids for ids in values]
        return tuple(sorted({tap for taps in parsed for tap in taps}))


def read_ladder(
    path: Path, base: dict[str, Any], chosen: dict[str, Any], only: list[str]
) -> Ladder:
    """`base` replaces values of the file; `chosen` are the settings of runs marked `chosen`."""
    values = tomllib.loads(path.read_text(encoding="utf-8"))
    rungs = []
    for run in values["run"]:
        needs_settings = run.get("chosen", False)
        if (not only or run["name"] in only) and (chosen or not needs_settings):
            settings = run.get("set", {}) | (chosen if needs_settings else {})
            rungs += [
                Rung(run["name"], run["label"], settings, seed) for seed in run.get("seeds", [0])
            ]
    if unknown := set(only) - {run["name"] for run in values["run"]}:
        raise UserError(f"{path} has no run {', '.join(sorted(unknown))}: correct --only")
    if not rungs:
        raise UserError(
            f"nothing to run in {path}: correct --only, or give --set for a run that needs it"
        )
    return Ladder(values["base"] | base, tuple(sorted(rungs, key=lambda rung: rung.seed)))


def read_answers(file: Path | None, config: TrainConfig, options: argparse.Namespace) -> Answers:
    """Read the answers from the file, or generate them and write the file.

    A separate target generates them, because a tapped one cannot.
    """
    sets = [word.strip() for word in options.sets.split(",")]
    if file is not None and file.is_file():
        stored: Answers = pickle.loads(file.read_bytes())
        if missing := [name for name in sets if (name, 0.0) not in stored]:
            raise UserError(
                f"{file} has no greedy answers to {missing[0]}: remove it, or name other --sets"
            )
        return {(name, 0.0): select_tasks(stored[name, 0.0], options.limit) for name in sets}
    tasks = read_sets(sets, options.bench, options.limit)
    target = load_teacher(config, choose_device(config.device))
    answers = {
        (name, 0.0): answer_tasks(target, tasks[name], options.max_tokens)[0] for name in tasks
    }
    if file is not None:
        write_bytes(file, pickle.dumps(answers))
    return answers


def select_tasks(documents: Documents, limit: int | None) -> Documents:
    """The documents of `limit` tasks, evenly chosen, because short answers come first."""
    tasks = [key.split("#")[0] for key in documents.keys]
    names = sorted(set(tasks))
    count = min(limit or len(names), len(names))
    picked = {names[i * len(names) // count] for i in range(count)}
    return join_documents([documents[i] for i, task in enumerate(tasks) if task in picked])


def train(
    rung: Rung, ladder: Ladder, shared: TrainRun, answers: Answers, out: Path
) -> dict[str, Any]:
    """Train and measure a run; returns its record and writes its drafter to OUT."""
    step_seconds: list[float] = []

    def progress(step: int, total: int, record: StepRecord) -> None:
        step_seconds.append(record.seconds_per_step)

    with tempfile.TemporaryDirectory(dir=out, prefix=f".{rung}.") as scratch:
        run = TrainRun(ladder.config(rung, out, Path(scratch)), shared=shared)
        if not run.train(progress, lambda _: None):
            raise KeyboardInterrupt
        trainer = run.trainer
        target = run.target
        drafter = checkpoint.load(trainer.out / "drafter", target, torch.float32)
        compact.save(drafter, out / str(rung), target, torch.bfloat16, rows=INT8)
    return {
        "name": rung.name,
        "seed": rung.seed,
        "label": rung.label,
        "target": target.name,
        "method": run.config.method,
        "settings": {
            key: value if key == "init" else getattr(run.config, key)
            for key, value in rung.settings.items()
        },
        "steps": trainer.step,
        "target_tokens": trainer.tokens,
        "seconds": round(trainer.seconds, 2),
        # as if everything had been compiled before the first step
        "seconds_compiled": round(median(step_seconds) * trainer.step, 2),
        "device": device_name(target.device),
        "bytes": sum(file.stat().st_size for file in (out / str(rung)).iterdir()),
        "sets": measure(run, out / str(rung), answers),
    }


def measure(run: TrainRun, folder: Path, answers: Answers) -> dict[str, Any]:
    """The acceptance of the drafter in the folder by set and draft shape.

    Its passes are not compiled, because compiling takes longer than running them.
    """
    drafter = checkpoint.load(folder, run.target, torch.float32)
    replay = run.trainer.replay(DrafterPasses(drafter, run.trainer.passes.dtype))
    tree_shapes = TREE_SHAPES if run.config.method == "p-eagle" else ()
    records: dict[str, Any] = {}
    for (name, _), documents in answers.items():
        chains = replay.chain_steps(documents, KS)
        trees = replay.tree_steps(documents, tree_shapes)
        steps_by_shape = {DraftShape(k, k): chains[k] for k in KS} | trees
        records[name] = {"answers": len(documents)} | {
            str(shape): acceptance_record(steps, shape.k) for shape, steps in steps_by_shape.items()
        }
    return records


def acceptance_record(steps: list[Step], k: int) -> dict[str, Any]:
    result = summarize(steps, k)
    return {
        "acceptance_length": round(result.acceptance_length, 4),
        "accepted_per_position": [round(share, 4) for share in result.accepted_per_position],
    }


def climb(ladder: Ladder, options: argparse.Namespace) -> int:
    """Run all runs without a record while time lasts; return the number of failures."""
    out = options.out
    started = time.perf_counter()
    longest = 0.0
    failed = 0
    remaining = [rung for rung in ladder.rungs if not (out / f"{rung}.json").is_file()]
    if not remaining:
        print("every run has its record")
        return 0
    settings = ladder.base | {"aux_layer_ids": ladder.taps, "out": str(out / ".store")}
    config = read_config(None, settings)
    answers = read_answers(options.answers, config, options)
    shared = TrainRun(config)
    for rung in remaining:
        run_started = time.perf_counter()
        if options.seconds and run_started - started + longest > options.seconds:
            print(f"{rung}: no time left")
            break
        try:
            record = train(rung, ladder, shared, answers, out)
            write_json(out / f"{rung}.json", record)
            spent = time.perf_counter() - run_started
            longest = max(longest, spent)
            print(summary_line(rung, record, spent), flush=True)
        except Exception as error:  # The other runs continue.
            failed += 1
            traceback.print_exc()
            print(f"{rung}: failed: {type(error).__name__}: {error}", flush=True)
        gc.collect()
        # Forget the recorded shapes: the next run has its own. Compiled code stays.
        torch._dynamo.reset_code_state()
        if shared.target.device.type == "cuda":
            torch.cuda.empty_cache()
    return failed


def summary_line(rung: Rung, record: dict[str, Any], spent: float) -> str:
    lengths = {name: values["K=7"]["acceptance_length"] for name, values in record["sets"].items()}
    by_set = " ".join(f"{name} {length:.2f}" for name, length in lengths.items())
    mean = sum(lengths.values()) / len(lengths)
    return (
        f"{rung}: K=7 mean {mean:.3f} ({by_set});"
        f" {record['seconds']:.0f} s of training, {spent:.0f} s in all"
    )


def parse_pairs(words: list[str]) -> Iterator[tuple[str, str]]:
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise UserError(f"cannot read {word!r}: write KEY=VALUE")
        yield key, value


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("ladder", type=Path, nargs="?", default=LADDER_FILE)
    parser.add_argument(
        "--data", required=True, help="folders of `peagle regenerate`, separated by commas"
    )
    parser.add_argument("--bench", type=Path, help="folder with NAME.jsonl of each set")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True, help="steps of every run")
    parser.add_argument("--sets", default="humaneval,mt_bench,gsm8k")
    parser.add_argument("--limit", type=int, help="number of tasks of a set")
    parser.add_argument("--max-tokens", type=int, default=256, help="tokens of an answer")
    parser.add_argument(
        "--answers",
        type=Path,
        help="a pickle of the target's answers; written if it does not exist",
    )
    parser.add_argument(
        "--seconds", type=float, help="time limit; no run begins that would exceed it"
    )
    parser.add_argument("--only", default="", help="names of runs, separated by commas")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="settings of the run `combined`",
    )
    parser.add_argument(
        "--base", action="append", default=[], metavar="KEY=VALUE", help="settings of all runs"
    )
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    options = parse_arguments(words)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        base = {"data": options.data, "steps": options.steps, "save_every": NEVER, "eval_every": 0}
        only = [word for word in options.only.split(",") if word]
        ladder = read_ladder(
            options.ladder,
            base | dict(parse_pairs(options.base)),
            dict(parse_pairs(options.set)),
            only,
        )
        return 1 if climb(ladder, options) else 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
