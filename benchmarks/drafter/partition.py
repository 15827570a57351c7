"""Peak memory and time of one training step by segments and length, for an 8B-shaped target.

python -m benchmarks.drafter.partition OUT

It needs a GPU, uses random weights and features, and writes partition.json and partition.png.
"""

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from peagle.drafter import Drafter
from peagle.drafter.config import DrafterConfig
from peagle.train.data.batch_transfer import flatten
from peagle.train.data.chains import sample_chains
from peagle.train.data.pack import BatchLayout, build_batch, pack_sequences
from peagle.train.features.teacher import PackFeatures
from peagle.train.objective.gradients import pack_gradients
from peagle.train.objective.loss import Loss
from peagle.train.objective.passes import DrafterPasses

LENGTHS = (2048, 8192, 20480)  # tokens of the sequence
SEGMENTS = (1, 2, 4, 8)
K = 8
DRAFTER_SIZES: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
}
VOCAB_SIZE = 128256
DRAFT_VOCAB_SIZE = 32000


@dataclass(frozen=True, slots=True)
class StepCost:
    """One training step; zeros if it does not fit the memory."""

    length: int
    segments: int
    rows: int = 0
    seconds: float = 0
    gigabytes: float = 0


def drafter_8b(layers: int = 4, device: str = "cuda") -> Drafter:
    config = DrafterConfig(
        method="p-eagle",
        num_layers=layers,
        vocab_size=VOCAB_SIZE,
        draft_vocab_size=DRAFT_VOCAB_SIZE,
        aux_layer_ids=(2, 16, 29),
        target_hidden_size=4096,
        num_taps=3,
        max_position_embeddings=131072,
        mask_token_id=128255,
        **DRAFTER_SIZES,
    )
    with torch.device(device):
        drafter = Drafter(config)
    drafter = drafter.to(device)
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    drafter.set_embed_and_head(
        torch.randn(VOCAB_SIZE, 4096, **options) * 0.02,
        torch.randn(DRAFT_VOCAB_SIZE, 4096, **options) * 0.02,
        torch.arange(DRAFT_VOCAB_SIZE, device=device),
    )
    return drafter.train().requires_grad_(True)


def measure(passes: DrafterPasses, length: int, segments: int) -> StepCost:
    rng = np.random.default_rng(0)
    packed = pack_sequences([(rng.integers(0, VOCAB_SIZE, length), np.arange(length) >= 64)])
    chains = sample_chains(packed.max_chain_lengths, K, 0.8, rng)
    layout = BatchLayout(segments=segments, flex=True)
    batch = flatten(build_batch(packed, chains, layout)).to("cuda")
    taps = torch.randn(length, 3 * 4096, device="cuda", dtype=torch.bfloat16)
    last_hidden = torch.randn(length, 4096, device="cuda", dtype=torch.bfloat16)
    features = PackFeatures(taps, last_hidden)
    loss = Loss(passes.drafter.lm_head, K, "kl", 1.0, 1.0, 0.0)
    durations = []
    for turn in range(3):
        if turn == 1:  # The first step warms up.
            torch.cuda.reset_peak_memory_stats()
        passes.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        started = time.perf_counter()
        pack_gradients(passes, batch, features, loss, 1 / batch.num_supervised, flex=True)
        torch.cuda.synchronize()
        durations.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated() / 1e9
    return StepCost(length, segments, batch.num_supervised, min(durations[1:]), peak)


def draw(costs: list[StepCost], path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    labels = {"gigabytes": "peak memory, GB", "seconds": "seconds a step"}
    for axis, (name, label) in zip(axes, labels.items(), strict=True):
        for segments in SEGMENTS:
            own = [cost for cost in costs if cost.segments == segments]
            x = [cost.length for cost in own]
            axis.plot(x, [getattr(cost, name) for cost in own], "o-", label=f"S = {segments}")
        axis.set(xlabel="tokens in the sequence", ylabel=label, ylim=(0, None))
        axis.legend()
    figure.savefig(path, dpi=100)


def main(out: Path) -> None:
    passes = DrafterPasses(drafter_8b(), torch.bfloat16)
    weights = torch.cuda.memory_allocated() / 1e9
    count = sum(p.numel() for p in passes.parameters()) / 1e6
    print(f"{count:.0f} M parameters, {weights:.1f} GB before the first step")
    out.mkdir(parents=True, exist_ok=True)
    costs: list[StepCost] = []
    for length in LENGTHS:
        for segments in SEGMENTS:
            try:
                costs.append(measure(passes, length, segments))
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                costs.append(StepCost(length, segments))
            print(asdict(costs[-1]), flush=True)
            text = json.dumps([asdict(cost) for cost in costs], indent=1)
            (out / "partition.json").write_text(text)
    draw([cost for cost in costs if cost.rows], out / "partition.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
