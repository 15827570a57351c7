"""What `tools.train_heads` trains and measures on: prompts, the target's answers, long contexts."""

import gzip
import json
import pickle
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from peagle.data.bench import Task, read_sets
from peagle.data.long_prompts import long_prompts
from peagle.errors import UserError
from peagle.paths import write_bytes, write_json
from peagle.regenerate.invent import invent
from peagle.regenerate.job import VALIDATION_FILE, RegenerateSettings, regenerate
from peagle.regenerate.long_conversations import LongSettings, long_conversations
from peagle.regenerate.prompts import Prompt, read_prompts, split_validation, write_prompts
from peagle.target import Target
from peagle.train.data.documents import Documents
from peagle.train.evaluation.benchmark_answers import answer_tasks
from tools.heads.recipes import Recipe

VALIDATION = 200  # prompts
PROMPTS_FILE = "prompts.jsonl.gz"
# Of the prompts of a source (the part before the colon) these many are used; the others whole.
SOURCE_LIMITS = {"t0": 4000, "clinc": 800, "banking77": 600, "bbh": 1200}
MAX_CHARACTERS = 1800  # of a prompt
SETS = ("humaneval", "mt_bench", "gsm8k")


@dataclass(frozen=True, slots=True)
class Size:
    """How much is answered; lengths are in tokens."""

    prompts: int | None = None  # None: all
    max_prompt: int = 512
    max_tokens: int = 384
    invented: int = 14000
    long_prompts: int = 16000
    long: int = 8192  # the longest conversation
    long_answer: int = 160
    tasks: int = 200  # of a set
    task_answer: int = 256
    contexts: tuple[int, ...] = (500, 1150, 2150, 4150, 7150)  # of a prompt and its answer
    context_prompts: int = 16  # for each length
    context_answer: int = 150


SMALL = Size(12, 200, 24, 4, 10, 700, 24, 2, 24, (500, 700), 1, 24)  # for a trial on a CPU


@dataclass(frozen=True, slots=True)
class Job:
    out: Path
    prompts: Path  # folder of `prepare`
    bench: Path
    seconds: float  # of this run
    answer_seconds: dict[str, float]  # by folder of answers; 0: it is left out
    p_eagle_seconds: float
    stages: tuple[str, ...]
    changes: dict[str, Any]  # of the recipe
    files: Path  # folder of the results
    size: Size
    start: float
    recipe: Recipe
    rungs: tuple[str, ...] = ()
    rung_seconds: float = 60.0  # of each rung's training
    temperature: float = 0.7  # of short answers
    rung_steps: int = 0  # of each rung's training; 0: rung_seconds
    eagle3_seconds: float = 0.0  # of EAGLE-3's training; 0: what is left
    windows: tuple[int, ...] = ()  # of the drafter, measured in long contexts; 0: none
    seed: int = 11  # of short answers; the others have seed + 1, the order of long ones seed + 2

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
    """Write the prompts to train on, shuffled, and those that are held out."""
    training, validation = split_validation(read_prompts(prompts), VALIDATION)
    random.Random(1).shuffle(training)
    kept: list[Prompt] = []
    counts: dict[str, int] = {}
    for prompt in (p for p in training if sum(map(len, p.turns)) <= MAX_CHARACTERS):
        source = prompt.source.split(":")[0]
        counts[source] = counts.get(source, 0) + 1
        if counts[source] <= SOURCE_LIMITS.get(source, len(training)):
            kept.append(prompt)
    write_prompts(validation, out / VALIDATION_FILE)
    plain = out / PROMPTS_FILE.removesuffix(".gz")
    write_prompts(kept, plain)
    write_bytes(out / PROMPTS_FILE, gzip.compress(plain.read_bytes(), 9))
    plain.unlink()
    print(f"{len(kept)} prompts to train on, {len(validation)} held out")


def write_answers(job: Job, target: Target) -> None:
    """Three folders of answers: to short prompts, greedy to invented ones, long conversations."""
    size = job.size
    file = job.prompts / PROMPTS_FILE
    temperatures = (job.temperature,)
    short = RegenerateSettings(
        size.max_tokens,
        size.max_prompt,
        temperatures,
        seed=job.seed,
        keep_truncated=True,
        prompts=file.name,
    )
    greedy = replace(short, temperatures=(0.0,), seed=job.seed + 1)
    long = replace(
        greedy,
        max_tokens=size.long_answer,
        max_prompt=size.long - size.long_answer,
        long=size.long,
    )
    if job.answer_seconds["short"]:
        _answer(job, target, read_prompts(file, temperatures, size.prompts), "short", short)
    if job.answer_seconds["invented"]:
        path = invent(target, size.invented, job.out / "invented", greedy.seed)
        _answer(job, target, read_prompts(path, prefix="invented:"), "invented", greedy)
    if job.answer_seconds["long"]:
        seed = job.seed + 2
        read = read_prompts(file, (0.0,), size.long_prompts, seed=seed)
        read = long_conversations(read, target, LongSettings(size.long, size.long_answer, seed))
        _answer(job, target, read, "long", long)


def _answer(
    job: Job, target: Target, prompts: list[Prompt], name: str, settings: RegenerateSettings
) -> None:
    record = job.out / f"answers-{name}.json"
    if record.is_file():
        if (seed := json.loads(record.read_text()).get("seed", settings.seed)) != settings.seed:
            raise UserError(f"{job.out / name} has the seed {seed}: give another --out or --seed")
        return
    with stage(f"{name} answers"):
        limit = job.answer_seconds[name]
        counts = regenerate(target, prompts, job.out / name, settings, stop_after=limit).as_dict()
        write_json(record, counts | {"seed": settings.seed})
        print(json.dumps(counts), flush=True)


def bench_answers(job: Job, target: Target) -> dict[str, Documents]:
    """The target's greedy answers by set, and to long prompts by their length."""
    file = job.out / "bench-answers.pkl"
    if file.is_file():
        stored: dict[str, Documents] = pickle.loads(file.read_bytes())
        return stored
    size = job.size
    sets = read_sets(list(SETS), job.bench)
    lengths = [length - size.context_answer for length in size.contexts]
    prompts = long_prompts(target, sets["humaneval"], lengths, size.context_prompts)
    curve = {f"context-{length + size.context_answer}": tasks for length, tasks in prompts.items()}
    sets |= read_sets([str(job.prompts / VALIDATION_FILE)])
    short = {name: tasks[: size.tasks] for name, tasks in sets.items()}
    answers = _answer_sets(target, short, size.task_answer)
    answers |= _answer_sets(target, curve, size.context_answer)
    write_bytes(file, pickle.dumps(answers))
    return answers


def _answer_sets(
    target: Target, sets: dict[str, list[Task]], max_tokens: int
) -> dict[str, Documents]:
    """All sets in one batch: each batch has its own start-up cost."""
    tasks = [replace(t, id=f"{name}/{t.id}") for name, own in sets.items() for t in own]
    documents, _ = answer_tasks(target, tasks, max_tokens)
    names = np.array([key.split("/")[0] for key in documents.keys])
    return {name: documents.subset(np.flatnonzero(names == name)) for name in sets}
