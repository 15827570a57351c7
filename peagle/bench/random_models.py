"""Pairs of a given shape with random weights, to measure what their steps cost."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, cast, get_args

import torch
from transformers import AutoModelForCausalLM

from peagle.bench.random_experts import random_mxfp4_model
from peagle.bench.shapes import (
    MXFP4_SHAPES,
    SHAPES,
    quantization_method,
    shape_config,
    shape_name,
)
from peagle.catalog.pair import Pair, TargetSource
from peagle.core import DRAFTER_METHODS, Method
from peagle.drafter import Drafter
from peagle.drafter.config import config_for
from peagle.errors import UserError
from peagle.loaded import LoadedPair
from peagle.target import Target, default_aux_layer_ids
from peagle.target.loading_error import loading_reason

__all__ = ["SHAPES", "parse_experts", "random_drafter", "random_pair", "shape_config"]

ExpertFormat = Literal["bf16", "mxfp4"]  # bf16: the dtype of the other weights, whichever it is
DRAFTER_LAYERS: dict[Method, int] = {"p-eagle": 4, "eagle3": 1}


def parse_experts(name: str | None, shape: str) -> ExpertFormat:
    """The format of that name; None: the usual one of the shape, or that of its config."""
    if name is None:
        is_mxfp4 = shape in MXFP4_SHAPES or quantization_method(shape) == "mxfp4"
        return "mxfp4" if is_mxfp4 else "bf16"
    if name not in get_args(ExpertFormat):
        raise UserError(f"unknown format of experts {name!r}: use bf16 or mxfp4")
    return cast("ExpertFormat", name)


def random_pair(
    shape: str,
    device: str,
    dtype: torch.dtype,
    seed: int = 0,
    experts: ExpertFormat = "bf16",
    methods: Sequence[Method] = DRAFTER_METHODS,
) -> LoadedPair:
    """A target of that shape with random weights, and random drafters of these methods for it."""
    config = shape_config(shape)
    name = shape_name(shape)
    torch.manual_seed(seed)
    with building(name):
        target = Target(random_model(config, device, dtype, experts), name=name)
        if shape not in SHAPES:  # Sizes of other configs may not match.
            target.forward(torch.zeros(1, dtype=torch.long, device=device))
            target.require_rollback()
        drafters = {
            method: random_drafter(target, method, layers)
            for method, layers in DRAFTER_LAYERS.items()
            if method in methods
        }
    return LoadedPair(Pair(name, TargetSource(()), {}, k=7), target, drafters)


@contextmanager
def building(name: str) -> Iterator[None]:
    """Say in one line why a model of that config does not run."""
    try:
        yield
    except UserError:
        raise
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"{name} does not fit the memory of the GPU: use a smaller shape, or `experts` in mxfp4"
        ) from error
    except Exception as error:  # transformers raises exceptions of any type
        raise UserError(
            f"cannot run {name} with random weights: {loading_reason(error).rstrip('.')}."
            " Correct its config, or give that of another causal language model"
        ) from error


def random_model(config: Any, device: str, dtype: torch.dtype, experts: ExpertFormat) -> Any:
    """A model of transformers; MXFP4 experts are made as such, so that large ones fit."""
    if experts == "mxfp4":
        return random_mxfp4_model(config, device, dtype)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)


def random_drafter(target: Target, method: Method, layers: int) -> Drafter:
    taps = aux_layer_ids(len(target.layers))
    config = config_for(
        target, method, layers, taps, mask_token_id=target.vocab_size - 1, trained=False
    )
    with torch.device(target.device):
        drafter = Drafter(config).to(target.dtype)
    drafter.set_embed_and_head(target.embedding, target.lm_head)
    return drafter.eval().requires_grad_(False)


def aux_layer_ids(layers: int) -> tuple[int, ...]:
    """vLLM's default; with fewer than 7 layers its ids are not ascending, and others are tapped."""
    if layers >= 7:
        return default_aux_layer_ids(layers)
    return tuple(sorted({0, layers // 2, layers - 1}))
