"""What vLLM lacks, and a drafter as vLLM runs it: without that.

Rows do not depend on a dependency, a confidence output or calibrated probabilities: what remains is a plain drafter.
Taps in every layer and bidirectional blocks change each row, so nothing right remains without them.
"""

from dataclasses import replace
from typing import Any

from peagle.drafter.config import DrafterConfig
from peagle.drafter.formats.tensors import build
from peagle.drafter.model import Drafter
from peagle.errors import UserError

LEFT_OUT: dict[str, Any] = {"dependency": 0, "confidence": False, "calibration": ()}
NEEDED = {"inject": "the taps in every layer", "bidirectional": "bidirectional blocks"}


def left_out_parts(config: DrafterConfig) -> list[str]:
    return [name for name in LEFT_OUT if getattr(config, name)]


def notice(config: DrafterConfig) -> str | None:
    """What a user is told, in one line; None where nothing is lost."""
    if not (names := left_out_parts(config)):
        return None
    return (
        f"vLLM cannot serve the drafter's {' and '.join(names)}, left out: fewer drafts may be accepted."
        " `peagle evaluate --as-vllm` shows how many"
    )


def vllm_subset(drafter: Drafter) -> Drafter:
    """The same weights without what vLLM lacks; the drafter itself where it has nothing of that."""
    config = drafter.config
    if needed := [name for name in NEEDED if getattr(config, name)]:
        what = " and ".join(NEEDED[name] for name in needed)
        settings = " and ".join(f"{name} = false" for name in needed)
        raise UserError(
            f"vLLM cannot serve {what} of this drafter: train one with {settings} for vLLM"
        )
    if not left_out_parts(config):
        return drafter
    tensors = {
        name: tensor
        for name, tensor in drafter.state_dict().items()
        if not name.startswith(("dependency.", "confidence.", "embed_tokens"))
    }
    tensors |= {"embed_tokens.weight": drafter.embed_tokens, "lm_head.weight": drafter.lm_head}
    tensors |= {} if drafter.target_ids is None else {"target_ids": drafter.target_ids}
    weight = drafter.fc.weight
    return build(replace(config, **LEFT_OUT), tensors, weight.dtype, weight.device)
