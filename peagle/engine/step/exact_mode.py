"""The exact mode of an engine: answers are bit-equal with and without drafts and other requests."""

from dataclasses import dataclass
from typing import Literal

import torch

from peagle.draft_shape import DraftShape
from peagle.engine.config import EngineConfig
from peagle.engine.model.batch_invariance import enable_batch_invariance
from peagle.engine.model.exactness import exact_multiple
from peagle.engine.step.stepper import Stepper
from peagle.errors import UserError
from peagle.target import Target

ExactMode = Literal["batched", "one by one"]


@dataclass(frozen=True, slots=True)
class ExactChoice:
    mode: ExactMode | None
    max_shape: DraftShape  # No draft exceeds it; exact mode may exclude trees.


def expects_exact_mode(config: EngineConfig, target: Target) -> bool:
    """Whether exact mode is turned on where it is supported."""
    if config.exact is None:
        return target.dtype != torch.float32
    return config.exact


def enable_exact_mode(config: EngineConfig, stepper: Stepper, max_shape: DraftShape) -> ExactChoice:
    """Turn exact mode on, if it is wanted: for batches where kernels allow it.

    Elsewhere every request has its own passes, which are padded to a multiple of rows.
    """
    requested = config.exact
    target = stepper.target
    if not expects_exact_mode(config, target):
        return ExactChoice(None, max_shape)
    reason = enable_batch_invariance(stepper.verifier, target, config.page_size, max_shape)
    if reason is None:
        return ExactChoice("batched", max_shape)
    if requested and config.tree is None:  # A tree is only the default here.
        max_shape = max_shape.as_chain()
    if max_shape.is_chain:
        multiple = exact_multiple(stepper.verifier, target, config.page_size, max_shape.k)
        if multiple is not None:
            stepper.fix_pass_sizes(multiple)
            return ExactChoice("one by one", max_shape)
    if requested is None:
        return ExactChoice(None, max_shape)
    fix = "Leave" if max_shape.is_chain else "Set `tree` to 0, or leave"
    raise UserError(
        f"exact mode is not supported for {target.name!r}: {reason}."
        f" {fix} out `exact` and set `dtype` to float32: a near tie is unlikely there"
    )
