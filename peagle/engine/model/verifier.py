"""The target as the engine runs it: lean where it is Llama-like and proves to be the same, else plugged."""

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from peagle.engine.kv.kv_cache import KVCache, KVShape
from peagle.engine.model.fused_llama import FusedLlamaTarget
from peagle.engine.model.hf_paged import HFPagedTarget
from peagle.kernels.row_pass import RowPass
from peagle.target import Target

PROBE = 24  # tokens
CLOSE = {torch.float32: 1e-3}  # of all logits' length may be the length of their difference
ROUGH = 0.1  # in half precision: rounding alone gives 0.02 for 32 layers; another architecture gives 0.3 and more


class Verifier(Protocol):
    taps: tuple[int, ...]

    def forward(
        self, ids: Tensor, rows: RowPass, memory: KVCache, keep: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """ids [T] -> logits [kept rows or T, vocabulary], g [T, taps * d]."""
        ...


def verifier_for(target: Target, length: int) -> Verifier:
    plugged = HFPagedTarget(target)
    if not llama_like(target):
        return plugged
    theirs = probe(plugged, target)
    lean = FusedLlamaTarget(target, length, plugged.windows)
    mine = probe(lean, target)
    apart = float((mine - theirs).norm() / theirs.norm())
    return lean if apart <= CLOSE.get(target.dtype, ROUGH) else plugged


@torch.inference_mode()
def probe(verifier: Verifier, target: Target) -> Tensor:
    """The logits of a few tokens, float32."""
    page = 16
    shapes = cache_shapes(target)
    memory = KVCache(shapes, 2, page, target.device)
    ids = torch.randint(target.vocab_size, (PROBE,), generator=torch.Generator().manual_seed(0)).to(
        target.device
    )
    at = torch.arange(PROBE, device=target.device)
    one = torch.tensor([PROBE], dtype=torch.int32, device=target.device)
    tables = torch.tensor([[1, 0]], dtype=torch.int32, device=target.device)
    slots = tables[0].long()[at // page] * page + at % page
    rows = RowPass(at, slots, tables, one * 0, one, one * 0, PROBE, page)
    return verifier.forward(ids, rows, memory)[0].float()


@torch.inference_mode()
def cache_shapes(target: Target) -> list[KVShape]:
    """What each layer stores, seen in a pass of one token."""
    cache = target.new_cache()
    target.forward(torch.zeros(1, dtype=torch.long, device=target.device), cache)
    shapes = []
    layers: list[Any] = cache.layers
    for layer in layers:
        keys = layer.keys
        shapes.append(KVShape(keys.shape[1], keys.shape[3], keys.dtype))
    return shapes


def llama_like(target: Target) -> bool:
    """Is every layer attention and a gated MLP, each behind one norm, and nothing else?"""
    decoder: Any = target.model.get_decoder()
    rotary, norm = getattr(decoder, "rotary_emb", None), getattr(decoder, "norm", None)
    if (
        rotary is None
        or norm is None
        or getattr(rotary, "rope_type", "default") in ("dynamic", "longrope")
    ):
        return False
    return all(plain_layer(layer) for layer in target.layers)


def plain_layer(layer: nn.Module) -> bool:
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    if attention is None or mlp is None:
        return False
    parts = set(dict(layer.named_children()))
    inner, gated = set(dict(attention.named_children())), set(dict(mlp.named_children()))
    linear = {"q_proj", "k_proj", "v_proj", "o_proj"}
    return (
        parts == {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
        and linear <= inner <= linear | {"q_norm", "k_norm"}
        and gated - {"act_fn"} == {"gate_proj", "up_proj", "down_proj"}
        and type(getattr(mlp, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")
        and all(isinstance(getattr(attention, name), nn.Linear) for name in linear)
        and all(getattr(mlp, name).bias is None for name in ("gate_proj", "up_proj", "down_proj"))
    )
