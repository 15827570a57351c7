"""Verifier: the target as the engine runs it.

A target that is built like a Llama, and whose fused form gives the logits of transformers, runs as
FusedLlamaTarget. Every other target runs as HFPagedTarget.
"""

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from peagle.engine.kv.kv_cache import KVCache, KVShape
from peagle.engine.model.fused_llama import FusedLlamaTarget
from peagle.engine.model.hf_paged import HFPagedTarget
from peagle.kernels.row_pass import RowPass
from peagle.target import Target

PROBE_TOKENS = 24
PROBE_PAGE_SIZE = 16
# Largest accepted norm of the difference of the logits, relative to their norm. In half precision,
# rounding alone gives 0.02 for 32 layers, and another architecture gives 0.3 and more.
MAX_ERROR_FLOAT32 = 1e-3
MAX_ERROR_HALF = 0.1


class Verifier(Protocol):
    taps: tuple[int, ...]  # ids of the layers whose inputs `forward` returns

    def forward(
        self, ids: Tensor, rows: RowPass, kv_cache: KVCache, logit_rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """ids [T] -> logits [T, vocabulary] and g [T, taps * d].

        `logit_rows`: compute logits of these rows only.
        """
        ...


def build_verifier(target: Target, length: int) -> Verifier:
    """The fastest verifier that gives the target's own logits, for up to `length` positions."""
    hf_paged = HFPagedTarget(target)
    if not is_llama_like(target):
        return hf_paged
    expected = probe_logits(hf_paged, target)
    fused = FusedLlamaTarget(target, length, hf_paged.windows)
    error = float((probe_logits(fused, target) - expected).norm() / expected.norm())
    limit = MAX_ERROR_FLOAT32 if target.dtype == torch.float32 else MAX_ERROR_HALF
    return fused if error <= limit else hf_paged


@torch.inference_mode()
def probe_logits(verifier: Verifier, target: Target) -> Tensor:
    """The float32 logits of a few random tokens, in two pages in reverse order."""
    device = target.device
    kv_cache = KVCache(target_kv_shapes(target), 2, PROBE_PAGE_SIZE, device)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(target.vocab_size, (PROBE_TOKENS,), generator=generator).to(device)
    positions = torch.arange(PROBE_TOKENS, device=device)
    count = torch.tensor([PROBE_TOKENS], dtype=torch.int32, device=device)
    tables = torch.tensor([[1, 0]], dtype=torch.int32, device=device)
    pages = tables[0].long()[positions // PROBE_PAGE_SIZE]
    slots = pages * PROBE_PAGE_SIZE + positions % PROBE_PAGE_SIZE
    zero = count * 0
    rows = RowPass(positions, slots, tables, zero, count, zero, PROBE_TOKENS, PROBE_PAGE_SIZE)
    return verifier.forward(ids, rows, kv_cache)[0].float()


@torch.inference_mode()
def target_kv_shapes(target: Target) -> list[KVShape]:
    """What each layer stores per position, read off the cache of a pass over one token."""
    cache = target.new_cache()
    target.forward(torch.zeros(1, dtype=torch.long, device=target.device), cache)
    layers: list[Any] = cache.layers
    return [KVShape(layer.keys.shape[1], layer.keys.shape[3], layer.keys.dtype) for layer in layers]


def is_llama_like(target: Target) -> bool:
    """Whether every layer is attention and a gated MLP, each behind one norm, and nothing else."""
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
    mlp_parts = set(dict(mlp.named_children()))
    projections = {"q_proj", "k_proj", "v_proj", "o_proj"}
    return (
        layer_parts == {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
        and projections <= attention_parts <= projections | {"q_norm", "k_norm"}
        and mlp_parts - {"act_fn"} == {"gate_proj", "up_proj", "down_proj"}
        and type(getattr(mlp, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")
        and all(isinstance(getattr(attention, name), nn.Linear) for name in projections)
        and all(getattr(mlp, name).bias is None for name in ("gate_proj", "up_proj", "down_proj"))
    )
