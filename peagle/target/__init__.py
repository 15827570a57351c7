"""The target: any transformers causal LM, with taps on its residual stream."""

from peagle.target.target import (
    Target,
    TargetOutput,
    check_aux_layer_ids,
    default_aux_layer_ids,
    load_target,
)

__all__ = ["Target", "TargetOutput", "check_aux_layer_ids", "default_aux_layer_ids", "load_target"]
