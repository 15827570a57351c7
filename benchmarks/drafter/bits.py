"""What rows of 4 bits cost: file size and acceptance length of the shipped heads.

    python -m benchmarks.drafter.bits DATA [--limit 12] [--method p-eagle] [--rows 8,4/32+fc]

DATA is the folder with the benchmark sets. The target answers every task once, and each variant of
the drafter drafts along these answers (K = 7, greedy, float32 on a CPU), so that all variants are
compared on the same positions. `+-` is the standard error of the difference to the first
variant, from a bootstrap over answers.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch

from peagle.core import Method, parse_method
from peagle.data.bench import read_sets
from peagle.drafter import Drafter
from peagle.drafter.formats import checkpoint, compact
from peagle.drafter.formats.row_format import RowFormat
from peagle.loaded import LoadedPair, load
from peagle.target import Target
from peagle.train.data.documents import Documents
from peagle.train.data.pack import Batch
from peagle.train.evaluation.acceptance import DraftReplay
from peagle.train.evaluation.benchmark_answers import answer_tasks
from peagle.train.features.features import FeatureExtractor
from peagle.train.features.teacher import PackFeatures
from peagle.train.objective.passes import DrafterPasses

K = 7
SETS = ("humaneval", "mt_bench")
RESAMPLES = 2000
# BITS/GROUP, and the matrices that keep 8 bits.
VARIANTS = "8,4/16,4/32,4/64,4/32+fc,4/64+fc,4/32+fc+layers.0,4/32+fc+dependency"
Counts = dict[str, np.ndarray]  # by set: [answers, 2], drafts and accepted drafts


def parse_rows(text: str) -> RowFormat:
    """Parse a variant: `4/32+fc` is 4 bits, groups of 32, fc in 8 bits."""
    sizes, *names = text.split("+")
    bits, _, group = sizes.partition("/")
    return RowFormat(int(bits), int(group or 32), ("embed_tokens", "lm_head", *names))


def stored(pair: LoadedPair, method: Method, rows: RowFormat) -> tuple[Drafter, int]:
    """The drafter of the pair after it was stored as `rows`, and the bytes of the file."""
    drafter = pair.drafter(method)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "drafter"
        compact.save(drafter, folder, pair.target, torch.bfloat16, rows)
        return (
            checkpoint.load(folder, pair.target),
            (folder / "model.safetensors").stat().st_size,
        )


class RememberedFeatures(FeatureExtractor):
    """Runs the target once for each answer."""

    def __init__(self, target: Target, aux_layer_ids: tuple[int, ...]) -> None:
        super().__init__(target, aux_layer_ids)
        self.remembered: dict[bytes, PackFeatures] = {}

    def __call__(self, batch: Batch) -> PackFeatures:
        key = batch.ids.numpy().tobytes()
        if key not in self.remembered:
            self.remembered[key] = super().__call__(batch)
        return self.remembered[key]


def count(drafter: Drafter, features: FeatureExtractor, answers: dict[str, Documents]) -> Counts:
    counts = {}
    for name, documents in answers.items():
        rows = []
        for index, length in enumerate(documents.lengths.tolist()):
            replay = DraftReplay(DrafterPasses(drafter), features, length)
            steps = replay.chain_steps(documents.subset(np.array([index])), [K])[K]
            rows.append((len(steps), sum(step.accepted for step in steps)))
        counts[name] = np.array(rows)
    return counts


def mean_length(counts: Counts, weights: dict[str, np.ndarray] | None = None) -> float:
    """The mean over sets of 1 + accepted / drafts; `weights` counts answers several times."""
    lengths = []
    for name, rows in counts.items():
        drafts, accepted = rows.sum(0) if weights is None else weights[name] @ rows
        lengths.append(1 + accepted / drafts)
    return float(np.mean(lengths))


def standard_error(counts: Counts, base: Counts) -> float:
    """The standard error of the relative difference of the mean lengths."""
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(RESAMPLES):
        weights = {
            name: np.bincount(rng.integers(len(rows), size=len(rows)), minlength=len(rows))
            for name, rows in base.items()
        }
        ratios.append(mean_length(counts, weights) / mean_length(base, weights))
    return float(np.std(ratios))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--skip", type=int, default=0, help="tasks of each set to leave out")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--method", default="p-eagle,eagle3")
    parser.add_argument("--rows", default=VARIANTS, help="the first is compared with all others")
    options = parser.parse_args()
    pair = load(device="cpu", dtype="float32")
    answers: dict[str, Documents] = {}
    sets = read_sets(list(SETS), options.data, options.skip + options.limit)
    for name, tasks in sets.items():
        answers[name], _ = answer_tasks(pair.target, tasks[options.skip :], options.tokens)
    print("| head | rows | bytes | " + " | ".join(SETS) + " | mean | change |")
    print("|---|---|--:|" + "--:|" * (len(SETS) + 2), flush=True)
    for method in options.method.split(","):
        aux_layer_ids = pair.drafter(parse_method(method)).config.aux_layer_ids or ()
        features = RememberedFeatures(pair.target, aux_layer_ids)
        base: Counts | None = None
        for label in options.rows.split(","):
            drafter, size = stored(pair, parse_method(method), parse_rows(label))
            counts = count(drafter, features, answers)
            base = base or counts
            lengths = [mean_length({name: counts[name]}) for name in counts]
            change = mean_length(counts) / mean_length(base) - 1
            cells = [f"{length:.3f}" for length in (*lengths, mean_length(counts))]
            error = standard_error(counts, base)
            print(
                f"| {method} | {label} | {size:,} | {' | '.join(cells)} |"
                f" {change:+.1%} +- {error:.1%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
