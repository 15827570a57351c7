"""Rungs: changes of the P-EAGLE recipe, trained in turn on the same documents, equally long.

`tools.train_heads run --stages answers,rungs` trains them. OUT/rungs/NAME holds the run of a rung,
OUT/rungs/NAME.json its record. A rung that has a record is not repeated, and one that was cut off
resumes from its last state. A rung whose loss is not finite is reported in one line, and the next
one begins. All rungs share the target, the documents and the cache of features.

    python -m tools.heads.rungs RECORD    # the tables of a record, also of long contexts
"""

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.drafter.bits import Counts, mean_length, standard_error
from peagle.data.records import ignore
from peagle.drafter.formats import checkpoint, compact
from peagle.paths import write_json
from peagle.train.config import TrainConfig
from peagle.train.data.documents import Documents
from peagle.train.publish import calibrate_drafter, new_passes
from peagle.train.run import TrainRun
from peagle.train.trainer import NonFiniteLoss, Progress
from tools.heads.data import Job, stage
from tools.heads.measure import TREE, K, answer_counts, new_replay, some_answers
from tools.heads.recipes import RUNGS, stored_format

# Seconds beside training: compiling and the first step; storing, calibrating, measuring the head.
RUNG_OVERHEAD_SECONDS = 50.0
MEASURE_SECONDS = 17.0
RECORDS_FILE = "rungs.json"
LONG = "context-"  # sets of long prompts: chains only, in a table of their own

NewConfig = Callable[[str, dict[str, Any]], TrainConfig]  # name, changes
NewLog = Callable[[TrainRun], Progress]


def train_rungs(
    job: Job, answers: dict[str, Documents], new_config: NewConfig, new_log: NewLog
) -> None:
    """Train and measure what is left of the rungs while there is time; print the table."""
    try:
        train_missing_rungs(job, answers, new_config, new_log)
    finally:  # The table has the finished rungs, also if another one ends with an error.
        records = read_records(job)
        write_json(job.files / RECORDS_FILE, records)
        print(rung_table(records), flush=True)


def train_missing_rungs(
    job: Job, answers: dict[str, Documents], new_config: NewConfig, new_log: NewLog
) -> None:
    run: TrainRun | None = None
    for name in job.rungs:
        if record_file(job, name).is_file():
            continue
        if job.left < planned_seconds(job) + RUNG_OVERHEAD_SECONDS and not resumable(job, name):
            print(f"{name}: no time left; run again", flush=True)
            continue
        with stage(f"rung {name}"):
            config = new_config(name, rung_changes(name))
            run = TrainRun(config, ignore, run)
            try:
                if not run.train(new_log(run), print, max(1.0, job.left - MEASURE_SECONDS)):
                    print(f"{name}: cut off after {run.trainer.step} steps; run again", flush=True)
                    break
                write_json(record_file(job, name), rung_record(job, name, run, answers))
            except NonFiniteLoss as error:
                print(f"{name}: failed: {error}", flush=True)
        gc.collect()
        torch._dynamo.reset_code_state()  # Forget the recorded shapes; compiled code stays.


def planned_seconds(job: Job) -> float:
    """Of a training; unknown for a number of steps."""
    return 0.0 if job.rung_steps else job.rung_seconds


def rung_changes(name: str) -> dict[str, Any]:
    """Of the recipe; NAME@SEED is a rung with another seed."""
    rung, _, seed = name.partition("@")
    return RUNGS[rung] | ({"seed": int(seed)} if seed else {})


def record_file(job: Job, name: str) -> Path:
    return job.out / "rungs" / f"{name}.json"


def resumable(job: Job, name: str) -> bool:
    """Whether a rung has a state, and time to go on."""
    return job.left > RUNG_OVERHEAD_SECONDS and (job.out / "rungs" / name / "state").is_dir()


def rung_record(
    job: Job, name: str, run: TrainRun, answers: dict[str, Documents]
) -> dict[str, Any]:
    """The stored, calibrated head on every set of answers: chains, and trees on some of them.

    Without answers that were held out from training, it is not calibrated.
    """
    trainer = run.trainer
    drafter = checkpoint.load(trainer.out / "drafter", run.target, torch.float32)
    folder = trainer.out / "stored"
    compact.save(drafter, folder, run.target, torch.bfloat16, stored_format(run.config))
    drafter = checkpoint.load(folder, run.target, torch.float32)
    calibrate_drafter(run, new_passes(run, drafter))
    replay = new_replay(drafter, trainer.features.uncached())
    record: dict[str, Any] = {
        "settings": rung_changes(name),
        "steps": trainer.step,
        "target_tokens": trainer.tokens,
        "seconds": round(trainer.seconds, 1),
        "bytes": (folder / "model.safetensors").stat().st_size,
        "calibration": list(drafter.config.calibration),
        "chain": {},
        "tree": {},
    }
    for key, documents in answers.items():
        steps = replay.chain_steps(documents, [K])[K]
        record["chain"][key] = answer_counts(steps, documents).tolist()
        if key.startswith(LONG) or run.config.method != "p-eagle":
            continue
        chosen = some_answers(documents)
        tree_steps = replay.tree_steps(chosen, [TREE])[TREE]
        record["tree"][key] = answer_counts(tree_steps, chosen).tolist()
    return record


def read_records(job: Job) -> dict[str, dict[str, Any]]:
    """All records of OUT, also those of other commands: in the order of RUNGS, then by seed."""
    names = [file.stem for file in (job.out / "rungs").glob("*.json")]
    order = list(RUNGS)
    names.sort(key=lambda name: (order.index(name.partition("@")[0]), name))
    return {name: json.loads(record_file(job, name).read_text()) for name in names}


def rung_table(records: dict[str, dict[str, Any]]) -> str:
    """Acceptance lengths of chains and trees on the validation answers and on the other sets.

    Changes are against the first rung of the method, with the standard error of a bootstrap over
    answers. EAGLE-3 drafts no trees.
    """
    lines = [
        f"| rung | steps | seconds | validation K={K} | change | tree 31 | change |"
        f" sets K={K} | tree 31 |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    bases: dict[str, dict[str, Any]] = {}  # by method
    for name, record in records.items():
        base = bases.setdefault(record["settings"].get("method", "p-eagle"), record)
        cells = [name, f"{record['steps']:,}", f"{record['seconds']:.0f}"]
        for kind in ("chain", "tree"):
            cells += validation_cells(record, base, kind)
        for kind in ("chain", "tree"):
            counts = set_counts(record, kind, validation=False)
            cells.append(f"{mean_length(counts):.3f}" if counts else "–")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def validation_cells(record: dict[str, Any], base: dict[str, Any], kind: str) -> list[str]:
    """The length on validation answers, and its change."""
    counts = set_counts(record, kind, validation=True)
    first = set_counts(base, kind, validation=True)
    if not counts or not first:
        return ["–", "–"]
    return [f"{mean_length(counts):.3f}", change_text(counts, first)]


def change_text(counts: Counts, base: Counts) -> str:
    """The relative change of the mean length, with the standard error over answers."""
    change = mean_length(counts) / mean_length(base) - 1
    return f"{change:+.1%} ± {standard_error(counts, base):.1%}"


def context_table(records: dict[str, dict[str, Any]]) -> str:
    """Acceptance lengths of chains behind long prompts, and changes against the first rung."""
    [base, *_] = records.values()
    names = [key for key in base["chain"] if key.startswith(LONG)]
    lines = [
        "| rung | " + " | ".join(name.removeprefix(LONG) for name in names) + " |",
        "|---|" + "--:|" * len(names),
    ]
    for rung, record in records.items():
        cells = [rung]
        for name in names:
            counts = {name: np.array(record["chain"][name])}
            first = {name: np.array(base["chain"][name])}
            change = "" if record is base else f" ({change_text(counts, first)})"
            cells.append(f"{mean_length(counts):.2f}{change}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def set_counts(record: dict[str, Any], kind: str, validation: bool) -> Counts:
    """By set, [answers, 2]: the validation answers, or the benchmark sets without long contexts."""
    return {
        key: np.array(counts)
        for key, counts in record[kind].items()
        if (key == "validation") == validation and not key.startswith(LONG)
    }


def main(record: str) -> None:
    records = json.loads(Path(record).read_text())
    print(f"{rung_table(records)}\n\n{context_table(records)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
