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

# GPUs whose engines are exact in batches by default, by compute capability. Hopper: the price of
# exact mode was measured there (docs/lossless.md).
DEFAULT_CAPABILITIES = ((9, 0),)


@dataclass(frozen=True, slots=True)
class ExactChoice:
    mode: ExactMode | None
    max_shape: DraftShape  # No draft exceeds it; exact mode may exclude trees.


def expects_exact_mode(config: EngineConfig, target: Target) -> bool:
    """Whether exact mode is turned on where it is supported."""
    if config.exact is not None:
        return config.exact
    if target.dtype == torch.float32:  # Near ties are unlikely.
        return False
    return config.max_batch == 1 or is_default_in_batches(target.device)


def is_default_in_batches(device: torch.device) -> bool:
    """Whether batches on this device are exact by default, where kernels allow it.

    Only the C kernels allow it on a CPU.
    """
    if device.type != "cuda":
        return True
    return torch.cuda.get_device_capability(device) in DEFAULT_CAPABILITIES


def enable_exact_mode(config: EngineConfig, stepper: Stepper, max_shape: DraftShape) -> ExactChoice:
    """Turn exact mode on, if it is wanted: for batches where kernels allow it.

    Elsewhere every request has its own passes, which are padded to a multiple of rows. For several
    requests at a time, that is too slow to be the default.
    """
    requested = config.exact
    target = stepper.target
    if not expects_exact_mode(config, target):
        return ExactChoice(None, max_shape)
    reason = enable_batch_invariance(stepper.verifier, target, config.page_size, max_shape)
    if reason is None:
        return ExactChoice("batched", max_shape)
    if requested is None and config.max_batch > 1:
        return ExactChoice(None, max_shape)
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
