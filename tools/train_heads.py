"""Train the shipped heads of SmolLM2-135M again: answers, P-EAGLE, EAGLE-3, measurement.

    python -m tools.train_heads prepare PROMPTS --out prompts/
    python -m tools.train_heads run --prompts prompts/ --bench bench/ --out OUT --seconds 580

`prepare` holds out 200 validation prompts and chooses those to train on. `run` does what is left to
do of its stages within `--seconds` and puts what it made into OUT/files; run it again to resume.
EAGLE-3 is trained on the same documents, and for as many steps as P-EAGLE if there is time.

The seconds of each stage are options. In one run: the defaults. In two, for longer training:

    python -m tools.train_heads run ... --seconds 560 --stages answers,p-eagle \\
        --answers 110,35,45 --p-eagle 215
    python -m tools.train_heads run ... --seconds 500 --stages eagle3,measure
"""

import argparse
import gc
import json
import math
import pickle
import random
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from peagle.core import Method
from peagle.data.bench import Task, read_sets
from peagle.data.long_prompts import long_prompts
from peagle.data.records import ignore
from peagle.draft_shape import DraftShape
from peagle.drafter.formats import checkpoint
from peagle.errors import UserError
from peagle.evaluate.evaluate import summarize
from peagle.loaded import load
from peagle.paths import write_bytes, write_json
from peagle.regenerate.invent import invent
from peagle.regenerate.job import RegenerateSettings, regenerate
from peagle.regenerate.long_conversations import LongSettings, long_conversations
from peagle.regenerate.prompts import Prompt, read_prompts, split_validation, write_prompts
from peagle.target import Target
from peagle.train.config import TrainConfig
from peagle.train.data.documents import Documents
from peagle.train.evaluation.benchmark_answers import answer_tasks
from peagle.train.objective.passes import DrafterPasses
from peagle.train.publish import publish
from peagle.train.records import StepRecord
from peagle.train.run import TrainRun

PAIR = "smollm2-135m"
SHIPPED = Path(__file__).resolve().parent.parent / "peagle" / "drafters" / PAIR
VALIDATION = 200  # prompts
# Of the prompts of a source (the part before the colon) these many are used; the others whole.
SOURCE_LIMITS = {"t0": 4000, "clinc": 800, "banking77": 600, "bbh": 1200}
MAX_CHARACTERS = 1800  # of a prompt
LONG = 8192  # tokens of the longest conversation
LONG_PROMPTS = 16000
CONTEXTS = (500, 1150, 2150, 4150, 7150)  # tokens of a prompt and its answer
CONTEXT_ANSWER = 150  # tokens
CONTEXT_PROMPTS = 16  # for each length
BENCH_LIMIT = 200  # tasks of a set
TREE_ANSWERS = 60  # of a set
K = 7
STAGES = ("answers", "p-eagle", "eagle3", "measure")
MEASURE_SECONDS = 45.0  # left for the last stage
MIN_TRAINING_SECONDS = 20.0

RECIPE: dict[str, Any] = {
    "target": PAIR,
    "aux_layer_ids": (2, 15, 27),
    "mask_token_id": 16,
    "draft_vocab": 24576,
    "max_length": LONG,
    "pack_tokens": 16384,
    "max_anchors": 6144,
    "keep": 0.75,
    "joined": 0.2,
    "held_out": 200,
    "loss": "lk",
    "mix": 0.95,
    "lr": 1.5e-3,
    "warmup": 0.02,
    "final_lr": 0.0,
    "epochs": 8.0,
    "log_every": 50,
    "save_every": 1500,
    "eval_every": 0,
}
METHODS: dict[Method, dict[str, Any]] = {
    "p-eagle": {"k": 11, "dependency": 64, "layers": 4},
    "eagle3": {"k": 7, "layers": 1},
}


@dataclass(frozen=True, slots=True)
class Job:
    out: Path
    prompts: Path  # folder of `prepare`
    bench: Path
    seconds: float  # of this run
    answer_seconds: dict[str, float]  # by folder of answers
    p_eagle_seconds: float
    stages: tuple[str, ...]
    small: bool  # for a trial on a CPU
    start: float

    @property
    def files(self) -> Path:
        """The folder of what is taken home."""
        return self.out / "files"

    @property
    def left(self) -> float:
        return self.start + self.seconds - time.perf_counter()


@contextmanager
def stage(name: str) -> Iterator[None]:
    started = time.perf_counter()
    print(f"== {name}", flush=True)
    yield
    print(f"== {name}: {time.perf_counter() - started:.1f} s", flush=True)


def prepare(prompts: Path, out: Path) -> None:
    """Write prompts.jsonl.gz, shuffled, and validation.jsonl."""
    import gzip

    training, validation = split_validation(read_prompts(prompts), VALIDATION)
    random.Random(1).shuffle(training)
    kept: list[Prompt] = []
    counts: dict[str, int] = {}
    for prompt in (p for p in training if sum(map(len, p.turns)) <= MAX_CHARACTERS):
        source = prompt.source.split(":")[0]
        counts[source] = counts.get(source, 0) + 1
        if counts[source] <= SOURCE_LIMITS.get(source, len(training)):
            kept.append(prompt)
    write_prompts(validation, out / "validation.jsonl")
    write_prompts(kept, out / "prompts.jsonl")
    packed = gzip.compress((out / "prompts.jsonl").read_bytes(), 9)
    write_bytes(out / "prompts.jsonl.gz", packed)
    (out / "prompts.jsonl").unlink()
    print(f"{len(kept)} prompts to train on, {len(validation)} held out, {len(packed):,} bytes")


def write_answers(job: Job, target: Target) -> None:
    """The three folders of answers: sampled, greedy to invented prompts, long conversations."""
    prompts = job.prompts / "prompts.jsonl.gz"
    slots = None if job.small else 4096
    size = 12 if job.small else None
    settings = RegenerateSettings(
        max_tokens=384,
        max_prompt=512,
        temperatures=(0.7,),
        seed=11,
        slots=slots,
        keep_truncated=True,
        prompts=prompts.name,
    )
    if job.small:
        settings = replace(settings, max_tokens=24, max_prompt=200)
    with stage("short answers"):
        read = read_prompts(prompts, settings.temperatures, size)
        _answer(job, target, read, "short", settings)
    with stage("answers to invented prompts"):
        greedy = replace(settings, temperatures=(0.0,), seed=12)
        count = 4 if job.small else 14000
        path = invent(target, count, job.out / "invented", greedy.seed, slots)
        _answer(job, target, read_prompts(path, prefix="invented:"), "invented", greedy)
    with stage("long conversations"):
        answer = 24 if job.small else 160
        length = 700 if job.small else LONG
        long = replace(
            greedy, max_tokens=answer, max_prompt=length - answer, slots=None, long=length
        )
        read = read_prompts(prompts, (0.0,), 10 if job.small else LONG_PROMPTS, seed=13)
        read = long_conversations(read, target, LongSettings(length, answer, 13))
        _answer(job, target, read, "long", long)


def _answer(
    job: Job, target: Target, prompts: list[Prompt], name: str, settings: RegenerateSettings
) -> None:
    record = job.files / f"answers-{name}.json"
    if record.is_file():
        return
    counts = regenerate(
        target, prompts, job.out / name, settings, stop_after=job.answer_seconds[name]
    )
    write_json(record, counts.as_dict())
    print(name, json.dumps(counts.as_dict()), flush=True)


def bench_answers(job: Job, target: Target) -> dict[str, Documents]:
    """The target's greedy answers by set, and to long prompts by their length."""
    file = job.out / "bench-answers.pkl"
    if file.is_file():
        stored: dict[str, Documents] = pickle.loads(file.read_bytes())
        return stored
    limit = 2 if job.small else BENCH_LIMIT
    sets = read_sets(["humaneval", "mt_bench", "gsm8k"], job.bench, None)
    contexts = CONTEXTS[:2] if job.small else CONTEXTS
    curve = {
        f"context-{length}": long_prompts(
            target,
            sets["humaneval"],
            length - CONTEXT_ANSWER,
            1 if job.small else CONTEXT_PROMPTS,
        )
        for length in contexts
    }
    sets |= read_sets([str(job.prompts / "validation.jsonl")])
    short = {name: tasks[:limit] for name, tasks in sets.items()}
    max_tokens = 24 if job.small else 256
    answers = _answer_sets(target, short, max_tokens)
    answers |= _answer_sets(target, curve, 24 if job.small else CONTEXT_ANSWER)
    write_bytes(file, pickle.dumps(answers))
    return answers


def _answer_sets(
    target: Target, sets: dict[str, list[Task]], max_tokens: int
) -> dict[str, Documents]:
    """All sets in one batch: each batch has its own start-up cost."""
    tasks = [replace(t, id=f"{name}/{t.id}") for name, own in sets.items() for t in own]
    documents, _ = answer_tasks(target, tasks, max_tokens)
    names = [key.split("/")[0] for key in documents.keys]
    return {
        name: documents.subset(torch.tensor([n == name for n in names]).nonzero()[:, 0].numpy())
        for name in sets
    }


def training_config(job: Job, method: Method, minutes: float, steps: int) -> TrainConfig:
    data = ",".join(str(job.out / name) for name in ("short", "invented", "long"))
    settings = RECIPE | METHODS[method]
    if job.small:
        settings |= {"max_length": 512, "pack_tokens": 512, "max_anchors": 128, "held_out": 3}
        settings |= {"log_every": 1, "epochs": 1.0}
    return TrainConfig(
        **settings,
        method=method,
        data=data,
        out=str(job.out / method),
        init=str(SHIPPED / method),
        minutes=minutes,
        steps=steps,
    )


def train_head(
    job: Job, method: Method, minutes: float, steps: int, shared: TrainRun | None
) -> TrainRun:
    """Train and publish a head; its folder goes to the files."""
    compiled: list[float] = []
    started = time.perf_counter()

    def progress(step: int, total: int, record: StepRecord) -> None:
        if not compiled:
            compiled.append(time.perf_counter() - started)
        if step % 500 < RECIPE["log_every"]:
            print(
                f"{method} step {step}: loss {record.loss:.4f}, lr {record.lr:.2e},"
                f" {record.seconds_per_step * 1000:.1f} ms, {record.seconds:.0f} s,"
                f" match {record.match[:K]}",
                flush=True,
            )

    run = TrainRun(training_config(job, method, minutes, steps), ignore, shared)
    print(
        f"{method}: {len(run.data.documents):,} documents, {len(run.data.documents.ids):,} tokens,"
        f" {run.data.documents.answer_tokens:,} answer tokens, vocabulary {run.data.coverage:.2%},"
        f" {type(run.trainer.features).__name__}, {time.perf_counter() - started:.1f} s to start",
        flush=True,
    )
    run.train(progress, print)
    trainer = run.trainer
    print(f"{method}: {trainer.step} steps, {trainer.tokens:,} tokens, {trainer.seconds:.1f} s")
    published = publish(run, ["python -m tools.train_heads run"])
    print(f"{method}: held-out acceptance length {published.acceptance_length}", flush=True)
    write_log(job, method, run)
    pack_folder(published.folder, job.files / f"{method}.tar")
    return run


def pack_folder(folder: Path, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w") as archive:
        for path in sorted(folder.iterdir()):
            archive.add(path, path.name)


def train_heads(job: Job) -> TrainRun | None:
    """Both heads, on the same documents; EAGLE-3 for as many steps as P-EAGLE, if time allows."""
    run = None
    overhead = 75.0  # seconds for reading, compiling and publishing
    if "p-eagle" in job.stages and not (job.files / "p-eagle.tar").is_file():
        with stage("P-EAGLE"):
            begun = time.perf_counter()
            run = train_head(job, "p-eagle", job.p_eagle_seconds / 60, 0, None)
            overhead = 0.8 * (time.perf_counter() - begun - run.trainer.seconds) + 25
        gc.collect()
        # Forget the recorded shapes: EAGLE-3 has its own. Compiled code stays.
        torch._dynamo.reset_code_state()
    if "eagle3" in job.stages and not (job.files / "eagle3.tar").is_file():
        with stage("EAGLE-3"):
            left = job.left - overhead - (MEASURE_SECONDS if "measure" in job.stages else 0)
            steps = json.loads((job.files / "training-p-eagle.json").read_text())["steps"]
            run = train_head(job, "eagle3", max(MIN_TRAINING_SECONDS, left) / 60, steps, run)
    return run


def write_log(job: Job, method: Method, run: TrainRun) -> None:
    """The figures of a run, for its card."""
    documents = run.data.documents
    lengths = sorted(documents.lengths.tolist())
    quantiles = {q: lengths[round(q / 100 * (len(lengths) - 1))] for q in (1, 10, 50, 90, 99)}
    record = {
        "steps": run.trainer.step,
        "target_tokens": run.trainer.tokens,
        "seconds": round(run.trainer.seconds, 1),
        "documents": len(documents),
        "tokens": len(documents.ids),
        "answer_tokens": documents.answer_tokens,
        "length_quantiles": quantiles,
        "tokens_in_documents_over_1024": int(sum(n for n in lengths if n > 1024)),
        "coverage": run.data.coverage,
    }
    write_json(job.files / f"training-{method}.json", record)
    log = run.trainer.out / "log.jsonl"
    if log.is_file():
        write_bytes(job.files / f"log-{method}.jsonl", log.read_bytes())


def measure(job: Job, run: TrainRun, answers: dict[str, Documents]) -> None:
    """The acceptance of the new and of the earlier heads; chains first, then trees."""
    records: dict[str, Any] = {}
    folders = {f"new {m}": job.out / m / "published" for m in METHODS}
    folders |= {f"shipped {m}": SHIPPED / m for m in METHODS}
    for tree in (False, True):
        for name, folder in folders.items():
            if job.left < 3 or (tree and "p-eagle" not in name) or not folder.is_dir():
                continue
            drafter = checkpoint.load(folder, run.target, torch.float32)
            replay = run.trainer.replay(DrafterPasses(drafter, run.trainer.passes.dtype))
            for key, documents in answers.items():
                records.setdefault(name, {}).setdefault(key, {}).update(
                    measure_trees(replay, documents) if tree else measure_chain(replay, documents)
                )
            write_json(job.files / "measured.json", records)
            summary = {key: list(r.values())[-1] for key, r in records[name].items()}
            print(name, "tree" if tree else "chain", json.dumps(summary), flush=True)


def measure_chain(replay: Any, documents: Documents) -> dict[str, float | int]:
    result = summarize(replay.chain_steps(documents, [K])[K], K)
    return {"answers": len(documents), f"K={K}": round(result.acceptance_length, 4)}


def measure_trees(replay: Any, documents: Documents) -> dict[str, float]:
    step = max(1, math.ceil(len(documents) / TREE_ANSWERS))
    chosen = documents.subset(torch.arange(0, len(documents), step).numpy())
    shape = DraftShape(K, 31)
    result = summarize(replay.tree_steps(chosen, [shape])[shape], K)
    return {"tree 31": round(result.acceptance_length, 4)}


def run_job(job: Job) -> None:
    job.files.mkdir(parents=True, exist_ok=True)
    with stage("loading"):
        target = load(PAIR, stored=False).target
    with stage("answers to benchmark sets"):
        answers = bench_answers(job, target)
    if "answers" in job.stages:
        write_answers(job, target)
    run = train_heads(job)
    if "measure" in job.stages:
        with stage("measuring"):
            config = training_config(job, "p-eagle", 0, 1)
            measure(job, run or TrainRun(config), answers)
    print(f"done, {job.left:.0f} s left", flush=True)


def new_job(options: argparse.Namespace, start: float) -> Job:
    stages = tuple(options.stages.split(","))
    if unknown := set(stages) - set(STAGES):
        raise UserError(f"unknown stage {unknown.pop()}: use some of {', '.join(STAGES)}")
    seconds = [float(word) for word in options.answers.split(",")]
    return Job(
        options.out,
        options.prompts,
        options.bench,
        options.seconds,
        dict(zip(("short", "invented", "long"), seconds, strict=True)),
        options.p_eagle,
        stages,
        options.small,
        start,
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
    running.add_argument("--seconds", type=float, default=580.0, help="of the whole run")
    running.add_argument(
        "--answers", default="70,22,34", help="seconds for short, invented and long answers"
    )
    running.add_argument("--p-eagle", type=float, default=95.0, help="seconds of its training")
    running.add_argument("--stages", default=",".join(STAGES))
    running.add_argument("--small", action="store_true", help="a trial with a few prompts")
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
