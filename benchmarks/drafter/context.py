"""Why the acceptance length falls with the context: variants of the drafter's attention.

    python -m benchmarks.drafter.context DATA [LENGTHS] [PROMPTS] [METHODS]

The target answers long prompts of humaneval (DATA/humaneval.jsonl) once; each variant then drafts
along the same answers, K = 7, greedy, float32 on a CPU. A key is visible as without a window, and:

    window     only if it is one of the last `window` positions
    sinks      or one of the first `sinks` positions
    sample     at distances of `local` or more, only with this probability
    clamp      its distance is treated as `clamp` if it is larger
    log_scale  scores are multiplied by log(visible keys) / log(log_scale), if that is above 1
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from peagle.core import Method, parse_method
from peagle.data.bench import read_sets
from peagle.data.long_prompts import long_prompts
from peagle.drafter.block import rotate
from peagle.evaluate.offline_acceptance import new_extractor
from peagle.loaded import LoadedPair, load
from peagle.train.data.attention_mask import RowSet, dense_mask
from peagle.train.data.documents import Documents
from peagle.train.evaluation import acceptance
from peagle.train.evaluation.acceptance import DraftReplay
from peagle.train.evaluation.benchmark_answers import answer_tasks
from peagle.train.evaluation.replay import acceptance_length
from peagle.train.features.teacher import PackFeatures
from peagle.train.objective import passes as drafter_passes
from peagle.train.objective.passes import DrafterPasses

K = 7
MAX_TOKENS = 150


@dataclass(frozen=True, slots=True)
class Variant:
    window: int = 1 << 30
    sinks: int = 0
    sample: float = 1.0
    local: int = 512
    clamp: int = 0
    log_scale: int = 0


VARIANTS = {
    "all keys": Variant(),
    "clamp 900": Variant(clamp=900),
    "512 and 5 % of the others": Variant(sample=0.05),
    "scaled": Variant(log_scale=1000),
    "window 512": Variant(window=512),
    "window 512 and 4 sinks": Variant(window=512, sinks=4),
    "window 1024": Variant(window=1024),
    "window 1024 and 4 sinks": Variant(window=1024, sinks=4),
}


class VariantAttention:
    """Replaces the mask and the attention of the drafter's passes."""

    def __init__(self, pair: LoadedPair, method: Method) -> None:
        self.rope = pair.drafter(method).rope
        self.variant = Variant()
        self.query_positions = self.key_positions = torch.zeros(0)

    def build_mask(self, q: RowSet, k: RowSet, flex: bool, lists: object = None) -> Tensor:
        variant = self.variant
        self.query_positions = q.anchor + q.depth  # One document begins at index 0.
        self.key_positions = k.anchor + k.depth
        distance = self.query_positions[:, None] - self.key_positions
        sampled = torch.rand(len(k), generator=torch.Generator().manual_seed(0)) < variant.sample
        is_sink = (k.depth == 0) & (k.anchor < variant.sinks)
        near = (distance < variant.window) & ((distance < variant.local) | sampled)
        return dense_mask(q, k) & (near | is_sink)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """q [Q, heads, d], k and v [K, kv_heads, d] -> [Q, heads, d]."""
        variant = self.variant
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k)
        if variant.clamp:
            at_limit = torch.full_like(self.query_positions, variant.clamp)
            plain = self.rotate(q, -self.query_positions)
            far = torch.einsum(
                "qhd,khd->hqk", self.rotate(plain, at_limit), self.rotate(k, -self.key_positions)
            )
            distance = self.query_positions[:, None] - self.key_positions
            scores = torch.where(distance < variant.clamp, scores, far)
        if variant.log_scale:
            visible = mask.sum(1).clamp(min=2).float()
            scores *= (visible.log() / math.log(variant.log_scale)).clamp(min=1)[:, None]
        weights = (scores * q.shape[-1] ** -0.5).masked_fill(~mask, -math.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = self.rope(x, positions[None])
        return rotate(x, (cos[0, :, None], sin[0, :, None]))


class OneDocument:
    """The features of a document, computed once for all variants."""

    def __init__(self, pair: LoadedPair, method: Method) -> None:
        self.source = new_extractor(pair.drafter(method), pair.target)
        self.target = pair.target
        self.features: PackFeatures | None = None

    def __call__(self, batch: acceptance.Batch) -> PackFeatures:
        self.features = self.features or self.source(batch)
        return self.features


def measure(pair: LoadedPair, method: Method, documents: Documents) -> dict[str, float]:
    """The acceptance length of every variant over all documents."""
    variants = VariantAttention(pair, method)
    acceptance.build_mask = variants.build_mask
    drafter_passes.attention = variants.attention  # type: ignore[assignment]
    steps: dict[str, list] = {name: [] for name in VARIANTS}
    for i in range(len(documents)):
        document = documents.subset(np.array([i]))
        features = OneDocument(pair, method)
        replay = DraftReplay(DrafterPasses(pair.drafter(method)), features, 128)  # type: ignore[arg-type]
        for name, variant in VARIANTS.items():
            variants.variant = variant
            steps[name] += replay.chain_steps(document, [K])[K]
    return {name: acceptance_length(own) for name, own in steps.items()}


def main(data: str, lengths: str = "1000,4000,7000", prompts: str = "3", methods: str = "") -> None:
    pair = load("smollm2-135m", device="cpu", dtype="float32", stored=False)
    [tasks] = read_sets(["humaneval"], Path(data)).values()
    sizes = [int(word) for word in lengths.split(",")]
    for length, long in long_prompts(pair.target, tasks, sizes, int(prompts)).items():
        documents, _ = answer_tasks(pair.target, long, MAX_TOKENS)
        for method in map(parse_method, (methods or "p-eagle,eagle3").split(",")):
            drafter = pair.drafter(method).with_window(None)
            windowless = LoadedPair(pair.pair, pair.target, {method: drafter})
            for name, value in measure(windowless, method, documents).items():
                print(f"{method:8} {length:6} {name:28} {value:.2f}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
