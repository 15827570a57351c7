"""The estimated cost of a run before it starts: rows, floating-point operations, memory, time."""

import os
import time
from dataclasses import dataclass

import torch

from peagle.drafter import Drafter
from peagle.target import Target
from peagle.train.config import TrainConfig
from peagle.train.data.chains import max_chain_rows
from peagle.train.data.documents import Documents
from peagle.train.objective.loss import CHUNK_ROWS
from peagle.train.setup import TrainingData

# Speed of whole steps as a fraction of the speed of one large matrix product.
EFFICIENCY = {"cuda": 0.35, "cpu": 0.6}
DEFAULT_EFFICIENCY = 0.5


@dataclass(frozen=True, slots=True)
class Plan:
    parameters: int
    documents: int
    tokens: int
    answer_tokens: int
    coverage: float  # of the draft vocabulary
    steps: int
    rows_per_step: int
    gigabytes: float
    free_gigabytes: float
    hours: float

    @property
    def fits(self) -> bool:
        return self.gigabytes <= self.free_gigabytes

    def lines(self) -> list[str]:
        return [
            f"{self.parameters / 1e6:.1f} M parameters;"
            f" the draft vocabulary covers {self.coverage:.2%} of the answers",
            f"{self.documents:,} documents, {self.tokens:,} tokens,"
            f" {self.answer_tokens:,} of them answers",
            f"{self.steps:,} steps of about {self.rows_per_step:,} rows",
            f"about {self.gigabytes:.1f} GB of memory beside the target,"
            f" of {self.free_gigabytes:.1f} free; {format_duration(self.hours)}",
        ]


def estimate_plan(
    config: TrainConfig, target: Target, drafter: Drafter, data: TrainingData, steps: int
) -> Plan:
    documents = data.documents
    anchors, chain_rows = estimate_pack_rows(config, documents)
    flops = config.packs_per_step * _pack_flops(config, target, drafter, anchors, chain_rows)
    efficiency = EFFICIENCY.get(target.device.type, DEFAULT_EFFICIENCY)
    seconds = steps * flops / (efficiency * measure_matrix_flops(target))
    if config.minutes:
        seconds = min(seconds, 60 * config.minutes)
    return Plan(
        parameters=_trainable_parameters(drafter),
        documents=len(documents),
        tokens=len(documents.ids),
        answer_tokens=documents.answer_tokens,
        coverage=data.coverage,
        steps=steps,
        rows_per_step=config.packs_per_step * (config.pack_tokens + chain_rows),
        gigabytes=estimate_training_bytes(config, drafter, documents) / 1e9,
        free_gigabytes=_free_bytes(target.device) / 1e9,
        hours=seconds / 3600,
    )


def format_duration(hours: float) -> str:
    return f"{hours:.1f} hours" if hours >= 1 else f"{max(1, round(60 * hours))} minutes"


def estimate_pack_rows(config: TrainConfig, documents: Documents) -> tuple[int, int]:
    """The approximate numbers of anchors and chain rows of a pack."""
    filled = min(config.pack_tokens, len(documents.ids))
    anchors = round(filled * documents.answer_tokens / max(len(documents.ids), 1))
    if config.max_anchors:
        anchors = min(anchors, config.max_anchors)
    return anchors, max_chain_rows(anchors, config.k, config.keep)


def _trainable_parameters(drafter: Drafter) -> int:
    return sum(p.numel() for p in drafter.parameters() if p.requires_grad)


def _pack_flops(
    config: TrainConfig, target: Target, drafter: Drafter, anchors: int, chain_rows: int
) -> float:
    """Operations of one pack.

    The target's forward pass, the drafter's forward and backward pass, and three products with
    lm_head for each supervised row; all passes of a refinement.
    """
    target_size = sum(p.numel() for p in target.model.parameters()) - target.embedding.numel()
    drafter_size = sum(p.numel() for p in drafter.layers.parameters()) + drafter.fc.weight.numel()
    passes = drafter.config.refinement
    if drafter.refinement is not None:
        drafter_size += passes * sum(p.numel() for p in drafter.refinement.parameters())
    rows = config.pack_tokens + chain_rows
    return (
        2 * target_size * config.pack_tokens
        + 6 * drafter_size * rows
        + 6 * drafter.lm_head.numel() * (anchors + chain_rows) * (1 + passes)
    )


def estimate_training_bytes(config: TrainConfig, drafter: Drafter, documents: Documents) -> float:
    """Memory beside the target.

    Weights, gradients and optimizer in float32; activations of depth 0 and of one segment; a chunk
    of logits; the features of a pack.
    """
    _, chain_rows = estimate_pack_rows(config, documents)
    size = drafter.lm_head.element_size()
    c = drafter.config
    row_bytes = size * (14 * c.hidden_size + 4 * c.intermediate_size + 4 * c.num_heads * c.head_dim)
    if config.checkpointing:
        row_bytes = size * 3 * c.hidden_size
    rows = config.pack_tokens + chain_rows / config.segments
    logits_bytes = CHUNK_ROWS * c.draft_vocab_size * 16
    feature_bytes = config.pack_tokens * (c.num_taps + 8) * c.target_hidden_size * size
    weight_bytes = 16 * _trainable_parameters(drafter)
    layers = c.num_layers + c.refinement
    return weight_bytes + rows * row_bytes * layers + logits_bytes + feature_bytes


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError, AttributeError):
        return float("inf")


def measure_matrix_flops(target: Target, size: int = 2048) -> float:
    """Measure the floating-point operations per second of a matrix product on this device."""
    size = size if target.device.type == "cuda" else 768
    x = torch.randn(size, size, device=target.device, dtype=target.dtype)
    durations = []
    for _ in range(4):
        started = time.perf_counter()
        for _ in range(4):
            x @ x
        if x.is_cuda:
            torch.cuda.synchronize()
        durations.append(time.perf_counter() - started)
    return 4 * 2 * size**3 / min(durations)
