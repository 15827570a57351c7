"""Peak memory and time of one training step against segments and length, for the drafter of an 8B-shaped target.

python -m tests.measure_partition OUT      (a GPU; random weights and features; writes partition.json and .png)
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch

from peagle.drafter import Drafter
from peagle.drafter.config import DrafterConfig
from peagle.train.data.batch_transfer import flatten
from peagle.train.data.chains import sample_chains
from peagle.train.data.pack import batch_of, pack
from peagle.train.objective.gradients import pack_gradients
from peagle.train.objective.loss import Loss
from peagle.train.objective.passes import Passes

LENGTHS, SEGMENTS, K = (2048, 8192, 20480), (1, 2, 4, 8), 8
SHAPE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
}
VOCAB, DRAFT_VOCAB = 128256, 32000


def drafter_8b(layers: int = 4, device: str = "cuda") -> Drafter:
    config = DrafterConfig(
        method="p-eagle",
        num_layers=layers,
        vocab_size=VOCAB,
        draft_vocab_size=DRAFT_VOCAB,
        aux_layer_ids=(2, 16, 29),
        target_hidden_size=4096,
        num_taps=3,
        max_position_embeddings=131072,
        mask_token_id=128255,
        **SHAPE,
    )
    with torch.device(device):
        drafter = Drafter(config)
    drafter = drafter.to(device)
    draw = {"device": device, "dtype": torch.bfloat16}
    drafter.set_embed_and_head(
        torch.randn(VOCAB, 4096, **draw) * 0.02,
        torch.randn(DRAFT_VOCAB, 4096, **draw) * 0.02,
        torch.arange(DRAFT_VOCAB, device=device),
    )
    return drafter.train().requires_grad_(True)


def measure(passes: Passes, length: int, segments: int) -> dict[str, float]:
    rng = np.random.default_rng(0)
    one = pack([(rng.integers(0, VOCAB, length), np.arange(length) >= 64)])
    batch = flatten(
        batch_of(one, sample_chains(one.room, K, 0.8, rng), False, segments, flex=True)
    ).to("cuda")
    g = torch.randn(length, 3 * 4096, device="cuda", dtype=torch.bfloat16)
    last = torch.randn(length, 4096, device="cuda", dtype=torch.bfloat16)
    loss = Loss(passes.drafter.lm_head, K, "kl", 1.0, 1.0, 0.0)
    spent = []
    for turn in range(3):
        if turn == 1:
            torch.cuda.reset_peak_memory_stats()
        passes.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        start = time.perf_counter()
        pack_gradients(passes, batch, g, last, loss, 1 / batch.rows, flex=True)
        torch.cuda.synchronize()
        spent.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 1e9
    return {
        "length": length,
        "segments": segments,
        "rows": batch.rows,
        "seconds": min(spent[1:]),
        "gigabytes": peak,
    }


def draw(rows: list[dict[str, float]], path: Path) -> None:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, key, label in zip(
        axes, ("gigabytes", "seconds"), ("peak memory, GB", "seconds a step"), strict=True
    ):
        for segments in SEGMENTS:
            own = [row for row in rows if row["segments"] == segments]
            axis.plot(
                [row["length"] for row in own],
                [row[key] for row in own],
                "o-",
                label=f"S = {segments}",
            )
        axis.set(xlabel="tokens in the sequence", ylabel=label, ylim=(0, None))
        axis.legend()
    figure.savefig(path, dpi=100)


def main(out: Path) -> None:
    passes = Passes(drafter_8b(), torch.bfloat16)
    weights = torch.cuda.memory_allocated() / 1e9
    count = sum(p.numel() for p in passes.parameters()) / 1e6
    print(f"{count:.0f} M parameters, {weights:.1f} GB before the first step")
    out.mkdir(parents=True, exist_ok=True)
    rows = []
    for length in LENGTHS:
        for segments in SEGMENTS:
            try:
                rows.append(measure(passes, length, segments))
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                rows.append(
                    {
                        "length": length,
                        "segments": segments,
                        "rows": 0,
                        "seconds": 0,
                        "gigabytes": 0,
                    }
                )
            print(rows[-1], flush=True)
            (out / "partition.json").write_text(json.dumps(rows, indent=1))
    draw([row for row in rows if row["rows"]], out / "partition.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
