"""transformers' own attention functions, behind whatever stands in front of them."""

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def hf_attention(name: str, module: nn.Module) -> Callable[..., tuple[Tensor, Any]]:
    """The attention of that name; "eager" is the one of the module's own file."""
    own: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(name, own)
