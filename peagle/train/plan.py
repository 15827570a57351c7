"""What a run will take, told before it starts: rows, floating-point operations, memory, time."""

import os
import time
from dataclasses import dataclass

import torch

from peagle.drafter import Drafter
from peagle.target import Target
from peagle.train.config import TrainConfig
from peagle.train.data.chains import most_rows
from peagle.train.data.documents import Documents
from peagle.train.objective.loss import CHUNK

EFFICIENCY = {
    "cuda": 0.35,
    "cpu": 0.6,
}  # of the speed of one large matrix product, seen in whole steps


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
            f"{self.parameters / 1e6:.1f} M parameters; the draft vocabulary covers {self.coverage:.2%} of the answers",
            f"{self.documents:,} documents, {self.tokens:,} tokens, {self.answer_tokens:,} of them answers",
            f"{self.steps:,} steps of about {self.rows_per_step:,} rows",
            f"about {self.gigabytes:.1f} GB of memory beside the target, of {self.free_gigabytes:.1f} free;"
            f" {duration(self.hours)}",
        ]


def plan_of(
    config: TrainConfig,
    target: Target,
    drafter: Drafter,
    documents: Documents,
    steps: int,
    coverage: float,
) -> Plan:
    tokens, answers = len(documents.ids), documents.answer_tokens
    anchors, chain_rows = rows_of_pack(config, documents)
    parameters = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    flops = config.packs_per_step * _flops(config, target, drafter, anchors, chain_rows)
    device = target.device.type
    return Plan(
        parameters=parameters,
        documents=len(documents),
        tokens=tokens,
        answer_tokens=answers,
        coverage=coverage,
        steps=steps,
        rows_per_step=config.packs_per_step * (config.pack_tokens + chain_rows),
        gigabytes=training_bytes(config, drafter, documents) / 1e9,
        free_gigabytes=_free(target.device) / 1e9,
        hours=steps * flops / (EFFICIENCY.get(device, 0.5) * matrix_speed(target)) / 3600,
    )


def duration(hours: float) -> str:
    return f"{hours:.1f} hours" if hours >= 1 else f"{max(1, round(60 * hours))} minutes"


def rows_of_pack(config: TrainConfig, documents: Documents) -> tuple[int, int]:
    """(anchors, chain rows) of a pack, about."""
    filled = min(config.pack_tokens, len(documents.ids))
    anchors = round(filled * documents.answer_tokens / max(len(documents.ids), 1))
    if config.max_anchors:
        anchors = min(anchors, config.max_anchors)
    return anchors, most_rows(anchors, config.k, config.keep)


def _flops(
    config: TrainConfig, target: Target, drafter: Drafter, anchors: int, chain_rows: int
) -> float:
    """Of one pack: the target's forward, the drafter's forward and backward, three products with lm_head a row."""
    body = sum(p.numel() for p in target.model.parameters()) - target.embedding.numel()
    own = sum(p.numel() for p in drafter.layers.parameters()) + drafter.fc.weight.numel()
    rows = config.pack_tokens + chain_rows
    return (
        2 * body * config.pack_tokens
        + 6 * own * rows
        + 6 * drafter.lm_head.numel() * (anchors + chain_rows)
    )


def training_bytes(config: TrainConfig, drafter: Drafter, documents: Documents) -> float:
    """Weights, gradients, optimizer (float32); activations of depth 0 and one segment; a pass of the target."""
    _, chain_rows = rows_of_pack(config, documents)
    parameters = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    size, c = drafter.lm_head.element_size(), drafter.config
    per_row = size * (14 * c.hidden_size + 4 * c.intermediate_size + 4 * c.num_heads * c.head_dim)
    if config.checkpointing:
        per_row = size * 3 * c.hidden_size
    rows = config.pack_tokens + chain_rows / config.segments
    chunk = CHUNK * c.draft_vocab_size * 16
    g = config.pack_tokens * (c.num_taps + 8) * c.target_hidden_size * size
    return 16 * parameters + rows * per_row * c.num_layers + chunk + g


def _free(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError, AttributeError):
        return float("inf")


def matrix_speed(target: Target, size: int = 2048) -> float:
    """Floating-point operations a second of one matrix product here, measured."""
    size = size if target.device.type == "cuda" else 768
    x = torch.randn(size, size, device=target.device, dtype=target.dtype)
    spent = []
    for _ in range(4):
        start = time.perf_counter()
        for _ in range(4):
            x @ x
        if x.is_cuda:
            torch.cuda.synchronize()
        spent.append(time.perf_counter() - start)
    return 4 * 2 * size**3 / min(spent)
