"""The part of a drafter that vLLM supports.

The rows do not depend on the dependency, the confidence output or the calibration: without them, a
plain drafter remains. Taps in every layer, bidirectional blocks and a convolution change the mask
rows themselves, and the rows of a drafter with a refinement are only the input of its passes, so a
drafter with these cannot be converted.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from peagle.drafter.config import DrafterConfig
from peagle.drafter.formats.tensors import build_drafter
from peagle.drafter.model import Drafter
from peagle.errors import UserError
from peagle.kernels.stored_matrix import dense

REMOVABLE: dict[str, Any] = {"dependency": 0, "confidence": False, "calibration": ()}
REQUIRED = {
    "inject": "taps in every layer",
    "bidirectional": "bidirectional blocks",
    "convolution": "the convolution",
    "refinement": "the refinement passes",
}


def left_out_parts(config: DrafterConfig) -> list[str]:
    return [name for name in REMOVABLE if getattr(config, name)]


def subset_notice(config: DrafterConfig) -> str | None:
    """A one-line warning about the parts that are left out; None if there are none."""
    if not (names := left_out_parts(config)):
        return None
    return (
        f"vLLM does not support the drafter's {' and '.join(names)}, which are left out:"
        " fewer drafts may be accepted"
    )


def vllm_subset(drafter: Drafter) -> Drafter:
    """The same weights without what vLLM lacks; the drafter itself if nothing must be removed."""
    config = drafter.config
    if required := [name for name in REQUIRED if getattr(config, name)]:
        parts = " and ".join(REQUIRED[name] for name in required)
        off = {name: 0 if name == "refinement" else "false" for name in required}
        settings = " and ".join(f"{name} = {value}" for name, value in off.items())
        raise UserError(
            f"vLLM does not support {parts} of this drafter: train one with {settings} for vLLM"
        )
    if not left_out_parts(config):
        return drafter
    removed = ("dependency.", "confidence.", "embed_tokens")
    tensors = {
        name: tensor
        for name, tensor in drafter.state_dict().items()
        if not name.startswith(removed)
    }
    weight = drafter.fc.weight
    tensors |= shared_tensors(drafter)
    kept = replace(config, **REMOVABLE)
    return build_drafter(kept, tensors, weight.dtype, weight.device, drafter.context)


def complete_tensors(drafter: Drafter) -> dict[str, Tensor]:
    """All tensors by our names, the shared ones included."""
    return dict(drafter.state_dict()) | shared_tensors(drafter)


def shared_tensors(drafter: Drafter) -> dict[str, Tensor]:
    """The tensors that may be the target's own."""
    tensors = {
        "embed_tokens.weight": dense(drafter.embed_table),
        "lm_head.weight": dense(drafter.head_table),
    }
    if drafter.target_ids is not None:
        tensors["target_ids"] = drafter.target_ids
    return tensors
