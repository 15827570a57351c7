"""Pairs of a given shape with random weights, to measure what their steps cost."""

from typing import Any, Literal, cast, get_args

import torch
from transformers import AutoModelForCausalLM

from peagle.bench.random_experts import random_mxfp4_model
from peagle.bench.shapes import MXFP4_SHAPES, SHAPES, shape_config, shape_name
from peagle.catalog.pair import Pair, TargetSource
from peagle.core import Method
from peagle.drafter import Drafter
from peagle.drafter.config import config_for
from peagle.errors import UserError
from peagle.loaded import LoadedPair
from peagle.target import Target

__all__ = ["SHAPES", "parse_experts", "random_drafter", "random_pair", "shape_config"]

ExpertFormat = Literal["bf16", "mxfp4"]  # bf16: the dtype of the other weights, whichever it is


def parse_experts(name: str | None, shape: str) -> ExpertFormat:
    """The format of that name; None: the usual one of the shape."""
    if name is None:
        return "mxfp4" if shape in MXFP4_SHAPES else "bf16"
    if name not in get_args(ExpertFormat):
        raise UserError(f"unknown format of experts {name!r}: use bf16 or mxfp4")
    return cast("ExpertFormat", name)


def random_pair(
    shape: str,
    device: str,
    dtype: torch.dtype,
    seed: int = 0,
    experts: ExpertFormat = "bf16",
) -> LoadedPair:
    """A target of that shape with random weights, and random drafters of both methods for it."""
    config = shape_config(shape)
    torch.manual_seed(seed)
    model = random_model(config, device, dtype, experts)
    name = shape_name(shape)
    target = Target(model, name=name)
    layers: dict[Method, int] = {"p-eagle": 4, "eagle3": 1}
    drafters = {method: random_drafter(target, method, count) for method, count in layers.items()}
    return LoadedPair(Pair(name, TargetSource(()), {}, k=7), target, drafters)


def random_model(config: Any, device: str, dtype: torch.dtype, experts: ExpertFormat) -> Any:
    """A model of transformers; MXFP4 experts are made as such, so that large ones fit."""
    if experts == "mxfp4":
        return random_mxfp4_model(config, device, dtype)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)


def random_drafter(target: Target, method: Method, layers: int) -> Drafter:
    config = config_for(
        target, method, layers, None, mask_token_id=target.vocab_size - 1, trained=False
    )
    with torch.device(target.device):
        drafter = Drafter(config).to(target.dtype)
    drafter.set_embed_and_head(target.embedding, target.lm_head)
    return drafter.eval().requires_grad_(False)
