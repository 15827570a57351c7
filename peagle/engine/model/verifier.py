"""Verifier: the target as the engine runs it.

A target that is built like a Llama, and whose fused form computes what transformers does at
positions up to the end of the context (verifier_probe.py), runs as FusedLlamaTarget. Every other
target runs as HFPagedTarget.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from peagle.engine.kv.kv_cache import KVCache, KVShape
from peagle.engine.model.fused_llama import FusedLlamaTarget
from peagle.engine.model.hf_paged import HFPagedTarget
from peagle.engine.model.mixture import SILU_CLASSES, is_supported_mixture
from peagle.engine.model.verifier_probe import VerifierProbe
from peagle.errors import UserError
from peagle.kernels.row_pass import RowPass
from peagle.kernels.triton.launch.compile_ahead import compile_ahead
from peagle.target import Target
from peagle.target.gguf.modules import StoredLinear

LINEAR_TYPES = (nn.Linear, StoredLinear)
Passes = Callable[[FusedLlamaTarget], object]


class Verifier(Protocol):
    taps: tuple[int, ...]  # ids of the layers whose inputs `forward` returns

    @property
    def is_stored(self) -> bool:
        """Whether the layers multiply with the weights of a GGUF file as stored."""
        ...

    def forward(
        self, ids: Tensor, rows: RowPass, kv_cache: KVCache, logit_rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """ids [T] -> logits [T, vocabulary] and g [T, taps * d].

        `logit_rows`: compute logits of these rows only.
        """
        ...


@dataclass(frozen=True, slots=True)
class ProbeResult:
    is_fused: bool
    windows: dict[int, int | None]  # the sliding window of each layer


# Results by dtype and number of positions: engines of one target are probed once.
_probe_results: WeakKeyDictionary[Target, dict[tuple[torch.dtype, int], ProbeResult]] = (
    WeakKeyDictionary()
)


def build_verifier(target: Target, length: int, passes: Passes | None = None) -> Verifier:
    """The fastest verifier that computes what the target does, for up to `length` positions.

    `passes`: launches passes of fused layers that will follow. On a GPU, their kernels start to
    compile while these layers are probed.
    """
    positions = min(length, target.context)
    known = _probe_results.setdefault(target, {})
    result = known.get((target.dtype, positions))
    if result is not None and result.is_fused:
        return FusedLlamaTarget(target, length, result.windows)
    hf_paged = HFPagedTarget(target)
    if result is None:
        fused = probe_fused(target, hf_paged, length, positions, passes)
        known[target.dtype, positions] = ProbeResult(fused is not None, hf_paged.windows)
        if fused is not None:
            return fused
    hf_paged.pack_stored(target.dtype)
    return hf_paged


def probe_fused(
    target: Target,
    hf_paged: HFPagedTarget,
    length: int,
    positions: int,
    passes: Passes | None = None,
) -> FusedLlamaTarget | None:
    """The target with fused layers, if those compute the same as its own modules."""
    probe = VerifierProbe(target, target_kv_shapes(target), positions)
    probe.compile_target(hf_paged, wait=False)
    fused: FusedLlamaTarget | None = None
    if probe.calls:  # The pass was run without launching anything.
        fused = fuse_plain(target, hf_paged, length, probe)
    if fused is not None:
        probe.compile_fused(fused, wait=False)
        if passes is not None:
            compile_ahead(partial(passes, fused), target.device, wait=False)
    probe.compile_target(hf_paged, wait=True)
    probe.run_target(hf_paged)
    probe.check_paged()
    fused = fused or fuse_plain(target, hf_paged, length, probe)
    return fused if fused is not None and probe.equals(fused) else None


def fuse_plain(
    target: Target, hf_paged: HFPagedTarget, length: int, probe: VerifierProbe
) -> FusedLlamaTarget | None:
    """The target with fused layers, if it is built like a Llama; a probed pass tells of attention.

    Only `VerifierProbe.equals` tells whether they compute the same.
    """
    if not is_llama_like(target) or not probe.is_plain_attention():
        return None
    return FusedLlamaTarget(target, length, hf_paged.windows)


@torch.inference_mode()
def target_kv_shapes(target: Target) -> list[KVShape]:
    """What each layer stores per position, read off the cache of a pass over one token."""
    cache = target.new_cache()
    target.forward(torch.zeros(1, dtype=torch.long, device=target.device), cache)
    layers: list[Any] = cache.layers
    if any(layer.keys.shape != layer.values.shape for layer in layers):
        raise UserError(
            f"the engine does not support target {target.name!r}, whose keys and values differ in"
            " size (latent attention): serve it with vLLM (`peagle serve --engine vllm`)"
        )
    return [KVShape(layer.keys.shape[1], layer.keys.shape[3], layer.keys.dtype) for layer in layers]


def is_llama_like(target: Target) -> bool:
    """Whether every layer is attention and an MLP, each behind one norm, and nothing else.

    The MLP is gated, or a mixture of gated experts.
    """
    decoder: Any = target.model.get_decoder()
    rotary = getattr(decoder, "rotary_emb", None)
    if rotary is None or getattr(decoder, "norm", None) is None:
        return False
    return all(is_llama_layer(layer) for layer in target.layers)


def is_llama_layer(layer: nn.Module) -> bool:
    attention = getattr(layer, "self_attn", None)
    mlp = getattr(layer, "mlp", None)
    if attention is None or mlp is None:
        return False
    layer_parts = set(dict(layer.named_children()))
    attention_parts = set(dict(attention.named_children()))
    projections = {"q_proj", "k_proj", "v_proj", "o_proj"}
    return (
        layer_parts == {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
        and projections <= attention_parts <= projections | {"q_norm", "k_norm"}
        and all(is_scale_norm(getattr(layer, name)) for name in layer_parts if "norm" in name)
        and all(isinstance(getattr(attention, name), LINEAR_TYPES) for name in projections)
        and (is_gated_mlp(mlp) or is_supported_mixture(mlp))
    )


def is_gated_mlp(mlp: Any) -> bool:
    """Whether an MLP is a SwiGLU without biases."""
    projections = {"gate_proj", "up_proj", "down_proj"}
    return (
        set(dict(mlp.named_children())) - {"act_fn"} == projections
        and type(getattr(mlp, "act_fn", None)).__name__ in SILU_CLASSES
        and all(getattr(mlp, name).bias is None for name in projections)
    )


def is_scale_norm(norm: nn.Module) -> bool:
    """Whether the norm's only parameter is a weight, as that of RMSNorm."""
    return set(dict(norm.named_parameters())) == {"weight"}
