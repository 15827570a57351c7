"""What a step costs on this device: the time of its CUDA graphs, and the experts that it touches.

No request may be live. Nothing is stored, and the slots are the same afterwards.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from peagle.draft_shape import DraftShape
from peagle.engine.model.fused_llama import FusedLlamaTarget
from peagle.engine.model.weight import Weight
from peagle.engine.step.batch_sizes import BATCH_BUCKETS, batch_bucket, graph_keys
from peagle.engine.step.stepper import Stepper
from peagle.kernels.expert_matrices import ExpertMatrices
from peagle.kernels.stored_matrix import table_bytes


@torch.inference_mode()
def time_graphs(
    stepper: Stepper, count: int, shape: DraftShape, repeats: int = 30
) -> tuple[float | None, float | None]:
    """Milliseconds of a step's two graphs: verification, acceptance with drafting."""
    verify_key, accept_key = graph_keys(batch_bucket(count), shape, shape)
    with _timed_rows(stepper, count):
        return (
            stepper.graphs.milliseconds(verify_key, repeats),
            stepper.graphs.milliseconds(accept_key, repeats),
        )


@torch.inference_mode()
def graph_costs(
    stepper: Stepper, shapes: Iterable[DraftShape], batches: Iterable[int] = BATCH_BUCKETS
) -> dict[tuple[int, DraftShape], float]:
    """Seconds of a step of random rows by batch size and shape, for those that have graphs."""
    costs = {}
    slots = stepper.slots
    with slots.preserved():
        slots.fill_random(stepper.target.vocab_size, stepper.kv_cache.discard_page)
        for batch in batches:
            for shape in shapes:
                verify_ms, draft_ms = time_graphs(stepper, batch, shape, repeats=5)
                if verify_ms and draft_ms:
                    costs[batch, shape] = (verify_ms + draft_ms) / 1000
    return costs


@contextmanager
def _timed_rows(stepper: Stepper, count: int) -> Iterator[Tensor]:
    """The first `count` slots with what they hold: the last requests, or random rows."""
    slots = list(range(min(count, stepper.slots.count)))
    with stepper.slots.preserved():
        stepper.slots.ends.zero_()
        yield stepper.slot_index(slots, batch_bucket(count) if stepper.on_gpu else len(slots))


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    touched: float  # experts that computed a row, mean over the mixture layers
    experts: int  # of a layer
    layer_bytes: int  # attention, routers, touched experts and dense MLPs of all layers


@torch.inference_mode()
def expert_load(stepper: Stepper, count: int, shape: DraftShape) -> ExpertLoad | None:
    """The experts that a verification touches; None for a target without experts."""
    target = stepper.verifier
    if not isinstance(target, FusedLlamaTarget) or target.expert_counts is None:
        return None
    with _timed_rows(stepper, count) as index:
        verify_key, _ = graph_keys(len(index), shape, shape)
        stepper.graphs.run(verify_key, lambda: stepper.verify(index, shape))
    return last_expert_load(target)


def last_expert_load(target: FusedLlamaTarget) -> ExpertLoad | None:
    """The load of the target's last pass; None if its layers have no experts."""
    if target.expert_counts is None:
        return None
    touched = target.expert_counts[:, -1].tolist()
    layers: list[Any] = target.layers
    layer_bytes = sum(matrix_bytes(layer.qkv) + matrix_bytes(layer.out) for layer in layers)
    mixtures = [layer.mlp for layer in layers if isinstance(layer.mlp.gate_up, ExpertMatrices)]
    dense = [layer.mlp for layer in layers if isinstance(layer.mlp.gate_up, Weight)]
    for mlp, count in zip(mixtures, touched, strict=True):
        layer_bytes += matrix_bytes(mlp.packed_router) + count * mlp.expert_bytes
    layer_bytes += sum(matrix_bytes(mlp.gate_up) + matrix_bytes(mlp.down) for mlp in dense)
    experts = target.expert_counts.shape[1] - 1
    return ExpertLoad(sum(touched) / len(touched), experts, layer_bytes)


def matrix_bytes(weight: Weight) -> int:
    """The bytes that a product of few rows reads."""
    if weight.matrix is not None:
        return weight.matrix.nbytes
    if weight.skinny_weight is not None:
        return table_bytes(weight.skinny_weight)
    return sum(table_bytes(part) for part in weight.parts)
