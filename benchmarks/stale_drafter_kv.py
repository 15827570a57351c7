"""The drafter's KV cache after `Engine.replace_drafter`: left as it is, or recomputed.

    python -m benchmarks.stale_drafter_kv DATA OUT [--method p-eagle] [--steps 15] [--scales 1,2,4]

DATA is the folder with the benchmark sets. The target answers tasks; the shipped drafter is trained
further on every second answer, and the new version replaces it in the middle of the other answers.
A scale of 4 stands for a version that is four times as far away: old + 4 (new - old).

    old          the shipped drafter to the end
    stale        the new version, over what the old one has left in the KV cache
    recomputed   the new version, after a prefill of prompt and first half

Greedy, K = 7, float32 on a CPU. The table has the acceptance length of the second half, and of its
first 8 steps, with the standard error of stale against recomputed from a bootstrap over answers.
Costs are in processor time, relative to one decode step.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from peagle.core import Method, Step, parse_method
from peagle.data.bench import read_sets
from peagle.drafter import Drafter
from peagle.drafter.formats import checkpoint
from peagle.drafter.replacement import private_copy
from peagle.engine import Engine, EngineConfig
from peagle.loaded import LoadedPair, load
from peagle.target import Target
from peagle.train.config import TrainConfig
from peagle.train.data.documents import Document, Documents
from peagle.train.evaluation.benchmark_answers import answer_tasks
from peagle.train.evaluation.replay import acceptance_length
from peagle.train.journal import Journal
from peagle.train.optim.parallel import World
from peagle.train.setup import TrainingData
from peagle.train.trainer import Trainer

K = 7
FIRST_STEPS = 8
MIN_ANSWER = 48  # tokens
RESAMPLES = 2000


@dataclass
class HalfAnswer:
    """The second half of an answer."""

    steps: list[Step]
    prefill_seconds: float  # of the processor, for prompt and first half
    decode_seconds: float
    swap_seconds: float = 0.0

    @property
    def accepted(self) -> int:
        return sum(step.accepted for step in self.steps)


@dataclass(frozen=True)
class Figures:
    scale: float
    weight_change: float  # norm of new - old, relative to old
    answers: int
    context: float  # mean tokens of prompt and first half
    old: float
    stale: float
    recomputed: float
    first_stale: float
    first_recomputed: float
    difference_error: float  # standard error of stale - recomputed
    prefill_in_decode_steps: float
    swap_in_decode_steps: float


def train_further(
    pair: LoadedPair, folder: Path, documents: Documents, out: Path, steps: int, rate: float
) -> None:
    """Train the drafter in `folder` for these steps; the new version is in `out`."""
    old = checkpoint.load(folder, pair.target)
    settings = old.config
    config = TrainConfig(
        target=pair.pair.name,
        out=str(out),
        method=settings.method,
        layers=settings.num_layers,
        k=K,
        aux_layer_ids=settings.aux_layer_ids or (),
        mask_token_id=-1 if settings.mask_token_id is None else settings.mask_token_id,
        init=str(folder),
        sliding_window=settings.sliding_window or -1,
        dependency=settings.dependency,
        pack_tokens=256,
        max_anchors=48,
        optimizer="adamw",
        schedule="constant",
        steps=steps,
        lr=rate,
        device="cpu",
        log_every=10,
        eval_every=0,
        save_every=0,
    )
    data = TrainingData(documents, documents.subset(np.arange(1)), old.target_ids, 1.0)
    trainer = Trainer(config, pair.target, data, World())
    journal = Journal(trainer.out, trainer.step, True)
    trainer.train(journal, lambda done, total, record: print(f"step {done} of {total}", flush=True))


def second_half(
    engine: Engine, document: Document, replacement: tuple[Drafter, Drafter] | None = None
) -> HalfAnswer:
    """Continue the answer behind its first half; `replacement`: the new version and the old one."""
    start = int(np.argmax(document.answer_mask))
    middle = (start + len(document.ids)) // 2
    remaining = len(document.ids) - middle
    started = time.process_time()
    stream = engine.add(document.ids[:middle].tolist(), max_tokens=remaining, ignore_eos=True)
    while not stream.poll():
        engine.step()
    half = HalfAnswer([], time.process_time() - started, 0.0)
    if replacement is not None:
        started = time.process_time()
        engine.replace_drafter(replacement[0])
        half.swap_seconds = time.process_time() - started
    started = time.process_time()
    engine.drain()
    half.decode_seconds = time.process_time() - started
    half.steps = [piece.step for piece in stream.poll() if piece.step]
    if replacement is not None:
        engine.replace_drafter(replacement[1])
    return half


def engine_for(pair: LoadedPair, method: Method) -> Engine:
    config = EngineConfig(
        method=method,
        k=K,
        ngram=False,
        max_batch=1,
        context=2048,
        kv_tokens=2048,
        prefill_chunk=2048,
        prefix_caching=False,
        thread=False,
    )
    return Engine(pair, config)


def difference_error(first: list[HalfAnswer], second: list[HalfAnswer]) -> float:
    """The standard error of the difference of acceptance lengths, paired by answer."""
    chosen = np.random.default_rng(0).integers(0, len(first), (RESAMPLES, len(first)))
    lengths = []
    for halves in (first, second):
        counts = np.array([[x.accepted, len(x.steps)] for x in halves])  # [answers, 2]
        sums = counts[chosen].sum(1)
        lengths.append(sums[:, 0] / sums[:, 1])
    return float(np.std(lengths[0] - lengths[1]))


def moved(old: Drafter, new: Drafter, target: Target, scale: float) -> Drafter:
    """The drafter old + scale * (new - old)."""
    other = private_copy(new, target)
    before = dict(old.named_parameters())
    for name, parameter in other.named_parameters():
        parameter.data.sub_(before[name]).mul_(scale).add_(before[name])
    return other


def weight_change(old: Drafter, new: Drafter) -> float:
    before, after = (torch.cat([x.flatten() for x in y.parameters()]) for y in (old, new))
    return float((after - before).norm() / before.norm())


def measure(
    pair: LoadedPair, old: Drafter, new: Drafter, documents: list[Document], scale: float
) -> Figures:
    method = old.config.method
    pair.replace_drafter(method, old)
    with engine_for(pair, method) as engine:
        plain = [second_half(engine, document) for document in documents]
        stale = [second_half(engine, document, (new, old)) for document in documents]
        engine.replace_drafter(new)
        recomputed = [second_half(engine, document) for document in documents]

    def length(halves: list[HalfAnswer], first: int | None = None) -> float:
        return acceptance_length(step for half in halves for step in half.steps[:first])

    steps = sum(len(half.steps) for half in recomputed)
    decode = sum(half.decode_seconds for half in recomputed) / steps
    middles = [(int(np.argmax(x.answer_mask)) + len(x.ids)) // 2 for x in documents]
    return Figures(
        scale,
        weight_change(old, new),
        len(documents),
        float(np.mean(middles)),
        length(plain),
        length(stale),
        length(recomputed),
        length(stale, FIRST_STEPS),
        length(recomputed, FIRST_STEPS),
        difference_error(stale, recomputed),
        float(np.mean([half.prefill_seconds for half in recomputed])) / decode,
        float(np.mean([half.swap_seconds for half in stale])) / decode,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--method", default="p-eagle", type=parse_method)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--scales", default="1,2,4")
    parser.add_argument("--rate", type=float, default=5e-4)
    parser.add_argument("--limit", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--sets", default="gsm8k,mt_bench")
    parser.add_argument(
        "--reverse", action="store_true", help="the shipped drafter replaces the other one"
    )
    options = parser.parse_args()
    torch.manual_seed(0)
    pair = load(device="cpu", dtype="float32", stored=False)
    folder = Path(str(pair.pair.drafter(options.method).folder))
    old = pair.drafter(options.method)
    tasks = read_sets(options.sets.split(","), options.data, options.limit)
    answers, _ = answer_tasks(
        pair.target, [x for each in tasks.values() for x in each], options.tokens
    )
    training = answers.subset(np.arange(0, len(answers), 2))
    documents = [answers[i] for i in range(1, len(answers), 2)]
    documents = [x for x in documents if x.answer_mask.sum() >= MIN_ANSWER]
    print(f"{len(training)} answers to train on, {len(documents)} to measure", flush=True)
    out = options.out / str(options.method)
    if not (out / "drafter").is_dir():
        train_further(pair, folder, training, out, options.steps, options.rate)
    new = checkpoint.load(out / "drafter", pair.target, pair.target.dtype)
    rows: list[Figures] = []
    for scale in map(float, options.scales.split(",")):
        versions = [old, moved(old, new, pair.target, scale)]
        before, after = versions[::-1] if options.reverse else versions
        rows.append(measure(pair, before, after, documents, scale))
        (options.out / f"{options.method}.json").write_text(
            json.dumps([asdict(row) for row in rows], indent=1)
        )
    print_table(rows)


def print_table(rows: list[Figures]) -> None:
    print(
        "| scale | weights changed by | old | stale | recomputed | first 8 steps: stale |"
        " recomputed | prefill, in steps | swap, in steps |\n|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
    )
    for row in rows:
        print(
            f"| {row.scale:g} | {row.weight_change:.1%} | {row.old:.3f} |"
            f" {row.stale:.3f} ± {row.difference_error:.3f} | {row.recomputed:.3f} |"
            f" {row.first_stale:.3f} | {row.first_recomputed:.3f} |"
            f" {row.prefill_in_decode_steps:.1f} | {row.swap_in_decode_steps:.1f} |"
        )


if __name__ == "__main__":
    main()
