"""The drafter's KV cache after `Engine.replace_drafter`: left as it is, or recomputed.

    python -m benchmarks.learning.stale_drafter_kv VERSION OUT [--domain json] [--answers 24]

VERSION is the folder of a learned version, such as DIR/versions/0001 of `benchmarks.learning.live`.
The target answers prompts of the domain, the last ones of its templates, which a run of live.py
does not reach. In the middle of each answer the version replaces the shipped drafter.

    old          the shipped drafter to the end
    stale        the version, over what the shipped drafter has left in the KV cache
    recomputed   the version, after a prefill of prompt and first half

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

from benchmarks.learning.domains import DOMAINS, domain_prompts
from peagle.core import Method, Step
from peagle.data.bench import Task
from peagle.drafter import Drafter
from peagle.drafter.formats import checkpoint
from peagle.engine import Engine, EngineConfig
from peagle.loaded import LoadedPair, load
from peagle.target import Target
from peagle.train.data.documents import Document
from peagle.train.evaluation.benchmark_answers import answer_tasks
from peagle.train.evaluation.replay import acceptance_length

K = 7
FIRST_STEPS = 8
MIN_ANSWER = 48  # tokens
MAX_TOKENS = 192
LEARNED_PROMPTS = 1000  # of a domain, which a version may have been trained on
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


def weight_change(old: Drafter, new: Drafter) -> float:
    before, after = (torch.cat([x.flatten() for x in y.parameters()]) for y in (old, new))
    return float((after - before).norm() / before.norm())


def measure(pair: LoadedPair, old: Drafter, new: Drafter, documents: list[Document]) -> Figures:
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


def domain_answers(target: Target, domain: str, count: int) -> list[Document]:
    """The target's answers to the last prompts of a domain, without very short ones."""
    prompts = domain_prompts(domain, LEARNED_PROMPTS + count)[LEARNED_PROMPTS:]
    tasks = [Task(str(number), (prompt,)) for number, prompt in enumerate(prompts)]
    answers, _ = answer_tasks(target, tasks, MAX_TOKENS)
    documents = [answers[i] for i in range(len(answers))]
    return [x for x in documents if x.answer_mask.sum() >= MIN_ANSWER]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("version", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--domain", choices=DOMAINS, default="json")
    parser.add_argument("--answers", type=int, default=24)
    options = parser.parse_args()
    pair = load(device="cpu", dtype="float32", stored=False)
    new = checkpoint.load(options.version, pair.target, pair.target.dtype)
    documents = domain_answers(pair.target, options.domain, options.answers)
    figures = measure(pair, pair.drafter(new.config.method), new, documents)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "stale_drafter_kv.json").write_text(json.dumps(asdict(figures), indent=1))
    print_table(figures)


def print_table(row: Figures) -> None:
    print(
        "| answers | tokens before the swap | weights changed by | old | stale | recomputed |"
        " first 8 steps: stale | recomputed | prefill, in steps | swap, in steps |\n"
        + "|--:" * 10
        + "|"
    )
    print(
        f"| {row.answers} | {row.context:.0f} | {row.weight_change:.1%} | {row.old:.3f} |"
        f" {row.stale:.3f} ± {row.difference_error:.3f} | {row.recomputed:.3f} |"
        f" {row.first_stale:.3f} | {row.first_recomputed:.3f} |"
        f" {row.prefill_in_decode_steps:.1f} | {row.swap_in_decode_steps:.1f} |"
    )


if __name__ == "__main__":
    main()
