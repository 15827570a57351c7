"""Train the heads of a pair: answers, P-EAGLE, EAGLE-3, measurement; or compare rungs.

    python -m tools.train_heads prepare PROMPTS --out prompts/
    python -m tools.train_heads run --prompts prompts/ --bench bench/ --out OUT --seconds 580

`prepare` holds out 200 validation prompts and chooses those to train on. `run` does what is left to
do of its stages within `--seconds` and puts what it made into OUT/files; run it again to resume.
EAGLE-3 is trained on the same documents, and for as many steps as P-EAGLE if there is time. In the
second half of a training the head is stored every minute, until it is published.

The seconds of each stage are options. In one run: the defaults. In two, for longer training:

    python -m tools.train_heads run ... --seconds 560 --stages answers,p-eagle \\
        --answers 110,35,45 --p-eagle 215
    python -m tools.train_heads run ... --seconds 500 --stages eagle3,measure

`--pair` chooses the recipe (heads/recipes.py). The stage `rungs` trains changes of the P-EAGLE
recipe in turn, each for as many seconds, and prints their acceptance lengths (heads/rungs.py):

    python -m tools.train_heads run ... --stages answers,rungs --rungs base,tree --rung-seconds 60

The stage `bench` only writes the target's answers to what is measured, for later commands.
`--rung-steps` trains for equal steps instead, also where several of these commands share a GPU and
an OUT folder. NAME@SEED is the rung NAME with another seed.
"""

import argparse
import gc
import json
import math
import sys
import tarfile
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from peagle.core import Method
from peagle.data.records import ignore
from peagle.drafter import Drafter
from peagle.drafter.formats import checkpoint, compact
from peagle.errors import UserError
from peagle.evaluate.offline_acceptance import new_extractor
from peagle.loaded import load
from peagle.paths import write_bytes, write_json, write_text
from peagle.target import Target
from peagle.train.config import TrainConfig, read_config
from peagle.train.data.documents import Documents
from peagle.train.features.features import FeatureSource
from peagle.train.publish import publish
from peagle.train.records import StepRecord
from peagle.train.run import TrainRun
from tools.heads.data import SMALL, Job, Size, bench_answers, prepare, stage, write_answers
from tools.heads.measure import K, measure_set, new_replay
from tools.heads.recipes import DEFAULT_PAIR, RECIPES, RUNGS, stored_format
from tools.heads.rungs import LONG, train_rungs

STAGES = ("bench", "answers", "p-eagle", "eagle3", "measure", "rungs")
DEFAULT_STAGES = "answers,p-eagle,eagle3,measure"
MEASURE_SECONDS = 45.0  # left for the last stage
OVERHEAD_SECONDS = 75.0  # for reading, compiling and publishing
MIN_TRAINING_SECONDS = 20.0
SNAPSHOT_SECONDS = 60.0
COUNTS_FILE = "measured-counts.json"

SMALL_CHANGES = {"pack_tokens": 512, "max_anchors": 128, "held_out": 3, "log_every": 1, "epochs": 1}


def training_config(job: Job, method: Method, minutes: float, steps: int) -> TrainConfig:
    folders = [job.out / name for name, seconds in job.answer_seconds.items() if seconds]
    recipe = job.recipe
    settings = recipe.settings | recipe.methods[method]
    settings |= SMALL_CHANGES if job.size.long == SMALL.long else {}
    settings |= {"method": method, "data": ",".join(map(str, folders))}
    shipped = recipe.shipped / method
    settings |= {
        "out": str(job.out / method),
        "init": str(shipped) if shipped.is_dir() else "target",
    }
    settings |= {"max_length": job.size.long, "minutes": minutes, "steps": steps}
    return read_config(None, settings | job.changes)


def rung_config(job: Job, name: str, changes: dict[str, Any]) -> TrainConfig:
    """The recipe of P-EAGLE, or of the rung's method, with its changes; `--set` changes all."""
    minutes = 0.0 if job.rung_steps else job.rung_seconds / 60
    base = training_config(job, changes.get("method", "p-eagle"), minutes, job.rung_steps)
    return read_config(None, asdict(base) | changes | {"out": str(job.out / "rungs" / name)})


class TrainingLog:
    """Prints some steps; in the second half of the time it stores the head now and then."""

    def __init__(self, job: Job, run: TrainRun, snapshots: bool = True) -> None:
        self.job = job
        self.snapshots = snapshots
        self.run = run
        self.next_snapshot = math.inf

    def __call__(self, step: int, total: int, record: StepRecord) -> None:
        config = self.run.config
        now = time.perf_counter()
        if self.next_snapshot == math.inf:
            self.next_snapshot = now + 60 * config.minutes / 2
        if now >= self.next_snapshot:
            if self.snapshots:
                store_snapshot(self.job, self.run)
            self.next_snapshot = now + SNAPSHOT_SECONDS
        if step % 500 < config.log_every:
            print(
                f"{config.method} step {step}: loss {record.loss:.4f}, lr {record.lr:.2e},"
                f" {record.seconds_per_step * 1000:.1f} ms, {record.seconds:.0f} s,"
                f" match {record.match[:K]}",
                flush=True,
            )


def train_head(
    job: Job, method: Method, minutes: float, steps: int, shared: TrainRun | None
) -> TrainRun:
    """Train and publish a head; its folder goes to the files."""
    run = TrainRun(training_config(job, method, minutes, steps), ignore, shared)
    trainer = run.trainer
    documents = run.data.documents
    print(
        f"{method}: {len(documents):,} documents, {len(documents.ids):,} tokens,"
        f" {documents.answer_tokens:,} answer tokens, vocabulary {run.data.coverage:.2%},"
        f" {type(trainer.features).__name__}",
        flush=True,
    )
    run.train(TrainingLog(job, run), print)
    print(f"{method}: {trainer.step} steps, {trainer.tokens:,} tokens, {trainer.seconds:.1f} s")
    write_record(job, method, run)
    command = f"python -m tools.train_heads run --pair {run.config.target}"
    published = publish(run, [command], job.recipe.max_rounding_loss)
    print(f"{method}: held-out acceptance length {published.acceptance_length}", flush=True)
    pack_folder(published.folder, job.files / f"{method}.tar")
    (job.files / f"{method}-snapshot.tar").unlink(missing_ok=True)
    return run


def store_snapshot(job: Job, run: TrainRun) -> None:
    """The head as it is now: what is left if the job is cut off."""
    trainer = run.trainer
    drafter = checkpoint.load(trainer.save_drafter(), run.target, torch.float32)
    folder = trainer.out / "snapshot"
    compact.save(drafter, folder, run.target, torch.bfloat16, stored_format(run.config))
    pack_folder(folder, job.files / f"{run.config.method}-snapshot.tar")


def pack_folder(folder: Path, file: Path) -> None:
    """Write a tar file beside `file` and rename it."""
    partial = file.with_name(f".{file.name}")
    with tarfile.open(partial, "w") as archive:
        for path in sorted(folder.iterdir()):
            archive.add(path, path.name)
    partial.replace(file)


def write_record(job: Job, method: Method, run: TrainRun) -> None:
    """The figures of a run and its log, for the card."""
    documents = run.data.documents
    lengths = documents.lengths
    record = {
        "steps": run.trainer.step,
        "target_tokens": run.trainer.tokens,
        "seconds": round(run.trainer.seconds, 1),
        "documents": len(documents),
        "tokens": len(documents.ids),
        "answer_tokens": documents.answer_tokens,
        "length_quantiles": {q: int(np.percentile(lengths, q)) for q in (1, 10, 50, 90, 99)},
        "tokens_in_documents_over_1024": int(lengths[lengths > 1024].sum()),
        "coverage": run.data.coverage,
        "answers": {
            name: json.loads((job.out / f"answers-{name}.json").read_text())
            for name, seconds in job.answer_seconds.items()
            if seconds
        },
    }
    write_json(job.out / f"training-{method}.json", record)
    write_json(job.files / f"training-{method}.json", record)
    write_bytes(job.files / f"log-{method}.jsonl", (run.trainer.out / "log.jsonl").read_bytes())


def train_heads(job: Job) -> TrainRun | None:
    """Both heads, on the same documents; EAGLE-3 for as many steps as P-EAGLE, if time allows."""
    run = None
    overhead = OVERHEAD_SECONDS
    if "p-eagle" in job.stages and not (job.out / "p-eagle" / "published").is_dir():
        with stage("P-EAGLE"):
            begun = time.perf_counter()
            run = train_head(job, "p-eagle", job.p_eagle_seconds / 60, 0, None)
            overhead = 0.8 * (time.perf_counter() - begun - run.trainer.seconds) + 25
        gc.collect()
        # Forget the recorded shapes: EAGLE-3 has its own. Compiled code stays.
        torch._dynamo.reset_code_state()
    if "eagle3" in job.stages and not (job.out / "eagle3" / "published").is_dir():
        with stage("EAGLE-3"):
            left = job.left - overhead - (MEASURE_SECONDS if "measure" in job.stages else 0)
            seconds = job.eagle3_seconds or max(MIN_TRAINING_SECONDS, left)
            run = train_head(job, "eagle3", seconds / 60, p_eagle_steps(job), run)
    return run


def p_eagle_steps(job: Job) -> int:
    """The steps of P-EAGLE's training; 0, which is no limit, if EAGLE-3 has seconds of its own."""
    if job.eagle3_seconds:
        return 0
    record = job.out / "training-p-eagle.json"
    if not record.is_file():
        raise UserError("P-EAGLE is not trained: add the stage p-eagle, or give --eagle3 seconds")
    return int(json.loads(record.read_text())["steps"])


def measure(job: Job, target: Target, run: TrainRun | None, answers: dict[str, Documents]) -> None:
    """The acceptance of the new and of the earlier heads; chains first, then trees.

    measured.json has the lengths, measured-counts.json drafts and accepted drafts of each answer.
    """
    records: dict[str, Any] = {}
    counts: dict[str, dict[str, dict[str, list[list[int]]]]] = {}
    features = None if run is None else run.trainer.features.uncached()
    methods = job.recipe.methods
    folders = {f"new {m}": job.out / m / "published" for m in methods}
    folders |= {f"shipped {m}": job.recipe.shipped / m for m in methods}
    for tree in (False, True):
        for name, folder in folders.items():
            if job.left < 3 or (tree and "p-eagle" not in name) or not folder.is_dir():
                continue
            drafter = checkpoint.load(folder, target, torch.float32)
            if features is None or features.aux_layer_ids != drafter.config.aux_layer_ids:
                features = new_extractor(drafter, target)
            replay = new_replay(drafter, features)
            for key, documents in answers.items():
                record = records.setdefault(name, {}).setdefault(key, {})
                measured = measure_set(replay, documents, tree)
                record |= measured.record
                own = counts.setdefault(name, {"chain": {}, "tree": {}})
                own["tree" if tree else "chain"][key] = measured.counts.tolist()
            if not tree:
                measure_windows(job, drafter, features, answers, name, records)
            write_json(job.files / "measured.json", records)
            write_text(job.files / COUNTS_FILE, json.dumps(counts))
            print(name, json.dumps(records[name]), flush=True)


def measure_windows(
    job: Job,
    drafter: Drafter,
    features: FeatureSource,
    answers: dict[str, Documents],
    name: str,
    records: dict[str, Any],
) -> None:
    """The acceptance of a head in long contexts with other sliding windows; 0: with none."""
    for window in job.windows:
        replay = new_replay(drafter.with_window(window or None), features)
        for key, documents in answers.items():
            if key.startswith(LONG) and job.left > 3:
                record = records.setdefault(f"{name}, window {window}", {}).setdefault(key, {})
                record |= measure_set(replay, documents, tree=False).record


def run_job(job: Job) -> None:
    job.files.mkdir(parents=True, exist_ok=True)
    job.out.mkdir(parents=True, exist_ok=True)
    answers = {}
    with stage("loading"):
        target = load(job.recipe.settings["target"], stored=False).target
    if {"bench", "measure", "rungs"} & set(job.stages):
        with stage("answers to benchmark sets"):
            answers = bench_answers(job, target)
    if "answers" in job.stages:
        write_answers(job, target)
    run = train_heads(job)
    if "measure" in job.stages:
        with stage("measuring"):
            measure(job, target, run, answers)
    if "rungs" in job.stages:
        new_log = partial(TrainingLog, job, snapshots=False)
        train_rungs(job, answers, partial(rung_config, job), new_log)
    print(f"done, {job.left:.0f} s left", flush=True)


def new_job(options: argparse.Namespace, start: float) -> Job:
    stages = tuple(options.stages.split(","))
    if unknown := set(stages) - set(STAGES):
        raise UserError(f"unknown stage {unknown.pop()}: use some of {', '.join(STAGES)}")
    if options.pair not in RECIPES:
        raise UserError(f"no recipe for {options.pair}: use one of {', '.join(RECIPES)}")
    rungs = tuple(options.rungs.split(","))
    if unknown := {rung.partition("@")[0] for rung in rungs} - set(RUNGS):
        raise UserError(f"unknown rung {unknown.pop()}: use some of {', '.join(RUNGS)}")
    seconds = [float(word) for word in options.answers.split(",")]
    changes = [word.partition("=") for word in options.set]
    size = SMALL if options.small else Size()
    tasks = options.tasks or size.tasks
    prompts = options.context_prompts or size.context_prompts
    return Job(
        options.out,
        options.prompts,
        options.bench,
        options.seconds,
        dict(zip(("short", "invented", "long"), seconds, strict=True)),
        options.p_eagle,
        stages,
        {key: value for key, _, value in changes},
        options.files or options.out / "files",
        replace(size, tasks=tasks, context_prompts=prompts),
        start,
        RECIPES[options.pair],
        rungs,
        options.rung_seconds,
        options.temperature,
        options.rung_steps,
        options.eagle3,
        tuple(int(word) for word in options.windows.split(",") if word),
        options.seed,
    )


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    preparing = commands.add_parser("prepare")
    preparing.add_argument("prompts", type=Path)
    preparing.add_argument("--out", type=Path, required=True)
    running = commands.add_parser("run")
    running.add_argument("--prompts", type=Path, required=True, help="folder of `prepare`")
    running.add_argument("--bench", type=Path, required=True, help="folder of the sets")
    running.add_argument("--out", type=Path, required=True)
    running.add_argument("--files", type=Path, help="folder of the results; OUT/files by default")
    running.add_argument("--seconds", type=float, default=580.0, help="of the whole run")
    running.add_argument(
        "--answers", default="70,22,34", help="seconds for short, invented and long answers"
    )
    running.add_argument("--temperature", type=float, default=0.7, help="of short answers")
    running.add_argument(
        "--seed", type=int, default=11, help="of the answers: new ones in another OUT"
    )
    running.add_argument("--p-eagle", type=float, default=85.0, help="seconds of its training")
    running.add_argument(
        "--eagle3", type=float, default=0.0, help="seconds of its training; 0: what is left"
    )
    running.add_argument(
        "--windows", default="", help="sliding windows that are measured too; 0: none"
    )
    running.add_argument("--pair", default=DEFAULT_PAIR, help=", ".join(RECIPES))
    running.add_argument("--stages", default=DEFAULT_STAGES, help=", ".join(STAGES))
    running.add_argument("--rungs", default="base,on-policy,tree,convolution")
    running.add_argument("--rung-seconds", type=float, default=60.0, help="of each training")
    running.add_argument(
        "--rung-steps", type=int, default=0, help="of each training, instead of seconds"
    )
    running.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    running.add_argument("--small", action="store_true", help="a trial with a few prompts")
    running.add_argument("--tasks", type=int, help="of each set that is measured")
    running.add_argument("--context-prompts", type=int, help="of each context length")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    start = time.perf_counter()
    options = parse_arguments(words)
    try:
        if options.command == "prepare":
            prepare(options.prompts, options.out)
        else:
            run_job(new_job(options, start))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
