"""The longest context for which a target over pages computes what transformers does.

Two features of Llama 4 begin behind a certain position, and the paged path does not have them:

* Attention in chunks: rows behind the first chunk of positions do not see the chunks before.
* Temperature tuning: queries are scaled from a certain position on. transformers takes the position
  of a row from its place in the pass, which is not its position in a batch of requests.
"""

from typing import Any

from torch import nn

from peagle.errors import UserError
from peagle.target import Target


def max_paged_context(config: Any) -> int | None:
    """None: no limit."""
    limits: list[int] = []
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        limits.append(int(config.attention_chunk_size))
    if getattr(config, "attn_temperature_tuning", False):
        limits.append(int(config.floor_scale) - 1)
    return min(limits, default=None)


def check_paged_context(target: Target, context: int) -> None:
    limit = max_paged_context(target.config)
    if limit is not None and context > limit:
        raise UserError(
            f"target {target.name!r} is supported for contexts of up to {limit} tokens, because its"
            f" attention changes behind them, and this one has {context}: set `context` to {limit}"
        )


def disable_temperature_tuning(model: nn.Module) -> None:
    """Switch it off: within the longest supported context its factor is 1."""
    for module in model.modules():
        if hasattr(module, "attn_temperature_tuning"):
            module.attn_temperature_tuning = False  # type: ignore[assignment]
