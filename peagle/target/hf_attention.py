"""The attention functions of transformers, for code that replaces them and calls the original."""

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def hf_attention(name: str, module: nn.Module) -> Callable[..., tuple[Tensor, Any]]:
    """The attention function with that name; "eager" is the one in the module's own file."""
    eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
