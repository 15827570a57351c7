"""What a pass says."""

from dataclasses import dataclass

from torch import Tensor

from peagle.engine.processing import Logprobs


@dataclass(slots=True)
class Result:
    """On the device: [B, R + 2], the target's tokens, how many drafts were kept, and whether logits are broken.

    The first kept + 1 tokens are new.
    """

    packed: Tensor
    logprobs: Logprobs | None = None
