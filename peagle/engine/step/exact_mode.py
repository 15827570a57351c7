"""The exact mode of an engine: answers are bit-equal with and without drafts and other requests."""

from dataclasses import dataclass
from typing import Literal

import torch

from peagle.draft_shape import DraftShape
from peagle.engine.config import EngineConfig
from peagle.engine.model.batch_invariance import enable_batch_invariance
from peagle.engine.model.exactness import exact_multiple
from peagle.engine.model.fused_llama import FusedLlamaTarget
from peagle.engine.step.stepper import Stepper
from peagle.errors import UserError
from peagle.target import Target
from peagle.target.gguf.modules import weight_bytes

ExactMode = Literal["batched", "one by one"]

# GPUs whose engines are exact in batches by default, by compute capability. Hopper: the price of
# exact mode was measured there (docs/lossless.md).
DEFAULT_CAPABILITIES = ((9, 0),)
# Weights of the largest target that is probed on a CPU by default. About 100 passes read all of
# them: 8 to 14 seconds for each GB on two cores.
MAX_DEFAULT_PROBE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class ExactChoice:
    mode: ExactMode | None
    reason: str | None  # Why requests do not share exact passes; None: they do.
    max_shape: DraftShape  # No draft exceeds it; exact mode may exclude trees.


def expects_exact_mode(config: EngineConfig, target: Target) -> bool:
    """Whether exact mode is turned on where it is supported."""
    return reason_against(config, target) is None


def reason_against(config: EngineConfig, target: Target) -> str | None:
    """Why exact mode is not tried; None: it is."""
    if config.exact is not None:
        return None if config.exact else "it is turned off"
    if target.dtype == torch.float32:
        return "in float32 near ties are unlikely: `exact` turns it on"
    if config.one_by_one or is_default_in_batches(target):
        return None
    return "its price is not measured for this GPU, or for quantized weights: `exact` turns it on"


def is_default_in_batches(target: Target) -> bool:
    """Whether batches of this target are exact by default, where kernels allow it.

    Only the C kernels allow it on a CPU. On a GPU, the price was not measured for quantized
    checkpoints: the vendor's library does not multiply with scales.
    """
    device = target.device
    if device.type != "cuda":
        return True
    capability = torch.cuda.get_device_capability(device)
    return target.format is None and capability in DEFAULT_CAPABILITIES


def is_probed_by_default(stepper: Stepper) -> bool:
    """False for large targets on the C kernels, which compute the same bits without a probe."""
    verifier = stepper.verifier
    if not isinstance(verifier, FusedLlamaTarget) or not verifier.uses_c_kernels:
        return True
    return weight_bytes(stepper.target.model) <= MAX_DEFAULT_PROBE_BYTES


def enable_exact_mode(config: EngineConfig, stepper: Stepper, max_shape: DraftShape) -> ExactChoice:
    """Turn exact mode on, if it is expected: for batches where kernels allow it.

    Elsewhere every request has its own passes, which are padded to a multiple of rows. That shares
    neither passes nor prefixes, so it is no default of an engine.
    """
    requested = config.exact
    target = stepper.target
    reason = reason_against(config, target)
    if reason is None and requested is None and not is_probed_by_default(stepper):
        reason = "the probe of so many weights takes long on a CPU: `exact` runs it"
    if reason is not None:
        return ExactChoice(None, reason, max_shape)
    reason = enable_batch_invariance(
        stepper.verifier, target, config.page_size, max_shape, reuse_proof=requested is None
    )
    if reason is None:
        return ExactChoice("batched", None, max_shape)
    if requested is None and not config.one_by_one:
        return ExactChoice(None, reason, max_shape)
    if requested and config.tree is None:  # A tree is only the default here.
        max_shape = max_shape.as_chain()
    if max_shape.is_chain:
        multiple = exact_multiple(stepper.verifier, target, config.page_size, max_shape.k)
        if multiple is not None:
            stepper.fix_pass_sizes(multiple)
            return ExactChoice("one by one", reason, max_shape)
    if requested is None:
        return ExactChoice(None, reason, max_shape)
    fix = "Leave" if max_shape.is_chain else "Set `tree` to 0, or leave"
    raise UserError(
        f"exact mode is not supported for {target.name!r}: {reason}."
        f" {fix} out `exact` and set `dtype` to float32: a near tie is unlikely there"
    )
