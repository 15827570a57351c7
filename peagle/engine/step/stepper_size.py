"""StepperSize: what a stepper allocates on the device."""

from dataclasses import dataclass

from peagle.draft_shape import DraftShape
from peagle.drafter import Drafter
from peagle.engine.kv.kv_cache import KVShape
from peagle.engine.model.verifier import target_kv_shapes
from peagle.target import Target


@dataclass(frozen=True, slots=True)
class StepperSize:
    max_shape: DraftShape  # No draft exceeds it, in depth or in nodes.
    num_pages: int
    page_size: int
    max_batch: int
    context: int
    ngram: bool = False  # Slots keep the tokens of their requests, for prompt lookup.


def kv_shapes(target: Target, drafter: Drafter | None) -> list[KVShape]:
    """The KV shapes of every layer of the target, then of the drafter."""
    shapes = target_kv_shapes(target)
    if drafter is not None:
        config = drafter.config
        shape = KVShape(config.num_kv_heads, config.head_dim, drafter.dtype)
        shapes += [shape] * config.num_layers
    return shapes
