"""Packed attention for the target: documents side by side in one sequence, with flex attention."""

from typing import Any

from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from peagle.target import Target
from peagle.train.data.attention_mask import BlockMask, attention

PACKED_ATTENTION = "peagle_packed"  # its name in transformers


def supports_packed_attention(target: Target) -> bool:
    """Whether every layer has plain causal attention, the only kind that is implemented."""
    config = target.config
    windowed = getattr(config, "sliding_window", None) and getattr(
        config, "use_sliding_window", True
    )
    return (
        not windowed
        and not getattr(config, "attn_logit_softcapping", None)
        and config.model_type != "gpt_oss"
    )


def register_packed_attention() -> str:
    """Register packed attention with transformers and return its name."""
    if PACKED_ATTENTION not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(PACKED_ATTENTION, _packed_attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(PACKED_ATTENTION, lambda *args, **kwargs: None)
    return PACKED_ATTENTION


def _packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    block_mask: BlockMask,
    **options: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, T, head_dim] -> [1, T, heads, head_dim]."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return attention(q, k, v, block_mask, options.get("scaling"))[None], None
