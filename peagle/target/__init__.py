"""The target: any transformers causal LM, with taps on its residual stream."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peagle.target.target import (
        Target,
        TargetOutput,
        check_aux_layer_ids,
        default_aux_layer_ids,
        load_target,
    )

__all__ = ["Target", "TargetOutput", "check_aux_layer_ids", "default_aux_layer_ids", "load_target"]


def __getattr__(name: str) -> Any:
    """Import torch only for the model itself: a web server loads the tokenizer without it."""
    if name not in __all__:
        raise AttributeError(f"module 'peagle.target' has no attribute {name!r}")
    from peagle.target import target

    return getattr(target, name)
