"""A Llama-like stack of layers in few operations: merged projections, one kernel where PyTorch would need several.

The same layers serve a target and its drafter, on a GPU (Triton) and on a CPU (C, or each kernel's reference). A target
is run this way only if it is built so, and if it gives what transformers gives (`verifier_for` tries).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from peagle.drafter import Drafter
from peagle.engine.kv.kv_cache import KVCache
from peagle.engine.model.attention import attend
from peagle.engine.model.weight import Weight
from peagle.kernels.attention_params import AttentionHeads, AttentionParams
from peagle.kernels.cpu.layer import FusedLayer, LayerMatrices, LayerWorkspace
from peagle.kernels.cpu.ops import supports_heads
from peagle.kernels.row_pass import RowPass
from peagle.kernels.triton.add_norm import add_norm
from peagle.kernels.triton.rope_store import rope_store
from peagle.target.quantized.read import joined_codes


@dataclass(frozen=True, slots=True)
class Layer:
    qkv: Weight
    out: Weight
    gate_up: Weight
    down: Weight
    before: Tensor  # the norm before attention
    after: Tensor  # the norm before the MLP
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    fused: FusedLayer | None = None  # the layer in one call, on CPUs that support it

    def run(
        self,
        normed: Tensor,
        residual: Tensor,
        rows: RowPass,
        memory: KVCache,
        at: int,
        rope: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """normed: attention's input [T, d or 2d] -> (the MLP's output, perhaps in shares; the residual stream before it
        is added)."""
        keys, values = memory.keys[at], memory.values[at]
        fused = self.fused
        if fused is not None:
            workspace = rows.cached(
                "layer_workspace", lambda: LayerWorkspace.create(rows, rope, fused.scratch_width)
            )
            return fused(normed, residual, workspace, keys, values)
        qkv = self.qkv.shares(normed)
        query = rope_store(qkv, rows, rope, keys, values, self.attention_heads)
        seen = attend(query, keys, values, rows, self.attention_params, memory.arrived)
        normed, residual = add_norm(
            self.out.shares(seen.flatten(1)), residual, self.after, self.eps
        )
        return self.down.shares(self.gate_up.gated(normed)), residual

    @property
    def attention_heads(self) -> AttentionHeads:
        return AttentionHeads(self.heads, self.kv_heads, self.q_norm, self.k_norm, self.eps)

    @property
    def attention_params(self) -> AttentionParams:
        return AttentionParams(self.head_dim**-0.5, self.window)

    @property
    def weights(self) -> list[Weight]:
        return [self.qkv, self.out, self.gate_up, self.down]

    def joined(self) -> "Layer":
        """The same, in one call where that can be had."""
        matrices = [weight.matrix for weight in self.weights if weight.matrix is not None]
        if len(matrices) < 4 or not supports_heads(self.head_dim, self.heads // self.kv_heads):
            return self
        fused = FusedLayer(
            LayerMatrices(*matrices),
            self.after,
            self.attention_heads,
            self.head_dim,
            self.attention_params,
        )
        return replace(self, fused=fused)

    def quantized(self) -> "Layer":
        for weight in self.weights:
            weight.quantize()
        return self.joined()


def merge(parts: list[Any]) -> tuple[Tensor, Tensor | None]:
    """The weights of several linear layers as one; the layers keep views of it, so nothing lies in memory twice."""
    if merged(parts):  # by an engine before
        first = parts[0]
        total = sum(len(part.weight) for part in parts)
        bias = None if first.bias is None else first.bias.data.as_strided((total,), (1,))
        return first.weight.data.as_strided(
            (total, first.weight.shape[1]), first.weight.stride()
        ), bias
    weight = torch.cat([part.weight.detach() for part in parts])
    bias = torch.cat([part.bias.detach() for part in parts]) if parts[0].bias is not None else None
    start = 0
    for part in parts:
        end = start + len(part.weight)
        part.weight.data = weight[start:end]
        if bias is not None:
            part.bias.data = bias[start:end]
        start = end
    return weight, bias


def merged(parts: list[Any]) -> bool:
    """Do their weights lie one behind the other in one piece of memory?"""
    first = parts[0].weight
    end = first.data_ptr()
    for part in parts:
        w = part.weight
        if (
            w.data_ptr() != end
            or w.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
        ):
            return False
        end += w.numel() * w.element_size()
    return True


def weight_of(parts: list[Any]) -> Weight:
    """Of linear layers with the same inputs."""
    return Weight(*merge(parts), joined_codes(parts))


def layer_of(
    module: Any, before: Tensor, after: Tensor, eps: float, head_dim: int, window: int | None
) -> Layer:
    """From a layer with transformers' names, as the drafter's blocks have them too."""
    attention, mlp = module.self_attn, module.mlp
    norms = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    q_norm, k_norm = (None if norm is None else norm.weight.detach() for norm in norms)
    return Layer(
        weight_of([attention.q_proj, attention.k_proj, attention.v_proj]),
        weight_of([attention.o_proj]),
        weight_of([mlp.gate_proj, mlp.up_proj]),
        weight_of([mlp.down_proj]),
        before.detach(),
        after.detach(),
        q_norm,
        k_norm,
        eps,
        attention.q_proj.weight.shape[0] // head_dim,
        attention.k_proj.weight.shape[0] // head_dim,
        head_dim,
        window,
    ).joined()


def rope_table(rotary: nn.Module, length: int, device: torch.device) -> Tensor:
    """[length, rotated dims]: the cosines of every position, then its sines; float32 whatever the model's dtype."""
    at = torch.arange(length, device=device)[None]
    cos, sin = rotary(torch.zeros(1, device=device), at)
    half = cos.shape[-1] // 2  # transformers repeats them
    return torch.cat([cos[0, :, :half], sin[0, :, :half]], -1).float().contiguous()


class FusedLlamaTarget:
    def __init__(self, target: Any, length: int, windows: Mapping[int, int | None]) -> None:
        """`windows`: of each layer, as transformers has it. A short probe would not miss a long one."""
        decoder = target.model.get_decoder()
        config = target.config
        head_dim = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        eps = config.rms_norm_eps
        self.layers = [
            layer_of(
                layer,
                layer.input_layernorm.weight,
                layer.post_attention_layernorm.weight,
                eps,
                head_dim,
                windows[i],
            )
            for i, layer in enumerate(target.layers)
        ]
        self.norm, self.eps = decoder.norm.weight.detach(), eps
        self.embed_tokens = target.embedding.detach()
        self.lm_head = Weight(target.lm_head)
        self.rope = rope_table(decoder.rotary_emb, length, target.device)
        self.taps: tuple[int, ...] = ()

    def shrink(self) -> float:
        """A quantized target's layers by their codes from now on, where kernels read them: the share of matrices."""
        small = [weight.shrink() for layer in self.layers for weight in layer.weights]
        self.layers = [layer.joined() for layer in self.layers]
        return sum(small) / len(small)

    def quantize(self) -> None:
        """Matrices in int8 from now on. Not before: that the target is Llama-like is tried with its own."""
        self.layers = [layer.quantized() for layer in self.layers]
        self.lm_head.quantize()

    def forward(
        self, ids: Tensor, rows: RowPass, memory: KVCache, keep: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """ids [T] -> logits [kept rows or T, vocabulary], g [T, taps * d]."""
        x, residual, taps = embedding(ids, self.embed_tokens), None, {}  # type: Tensor, Tensor | None, dict[int, Tensor]
        for i, layer in enumerate(self.layers):
            normed, residual = add_norm(x, residual, layer.before, self.eps)
            if i in self.taps:
                taps[i] = residual
            x, residual = layer.run(normed, residual, rows, memory, i, self.rope)
        normed, _ = add_norm(x, residual, self.norm, self.eps)
        g = (
            torch.cat([taps[i] for i in self.taps], -1)
            if self.taps
            else normed.new_empty(len(normed), 0)
        )
        return self.lm_head(normed if keep is None else normed[keep]), g


class FusedLlamaDrafter:
    """The drafter over the same pages: its layers come behind the target's in memory."""

    def __init__(self, drafter: Drafter, behind: int, length: int) -> None:
        config = drafter.config
        self.drafter, self.behind = drafter, behind
        blocks: list[Any] = list(drafter.layers)
        self.layers = [
            layer_of(
                block,
                block.input_layernorm.weight,
                block.post_attention_layernorm.weight,
                config.rms_norm_eps,
                config.head_dim,
                None,
            )
            for block in blocks
        ]
        self.rope = rope_table(drafter.rope, length, drafter.fc.weight.device)
        self.norm = drafter.norm.weight.detach()
        self.hidden_norm = blocks[0].hidden_norm.weight.detach()
        self.norm_before_residual = config.norm_before_residual
        self.inject = (
            weight_of(list(drafter.inject)) if len(drafter.inject) else None
        )  # of all layers at once
        self.eps = config.rms_norm_eps

    def quantize(self) -> None:
        self.layers = [layer.quantized() for layer in self.layers]
        if self.inject is not None:
            self.inject.quantize()

    def forward(
        self, embeds: Tensor, hidden: Tensor, rows: RowPass, memory: KVCache
    ) -> tuple[Tensor, Tensor]:
        """embeds, hidden [T, d] -> the residual stream behind the last layer [T, d]: normed, and as it is."""
        d = hidden.shape[1]
        both = torch.empty(len(hidden), 2 * d, dtype=hidden.dtype, device=hidden.device)
        add_norm(embeds, None, self.layers[0].before, self.eps, out=both[:, :d])
        normed, _ = add_norm(hidden, None, self.hidden_norm, self.eps, out=both[:, d:])
        x, residual = self.layers[0].run(
            both,
            normed if self.norm_before_residual else hidden,
            rows,
            memory,
            self.behind,
            self.rope,
        )
        injected = None if self.inject is None else self.inject(hidden).unflatten(1, (-1, d))
        for i, layer in enumerate(self.layers[1:], start=1):
            if injected is not None:
                residual = residual + injected[:, i - 1]
            normed, residual = add_norm(x, residual, layer.before, self.eps)
            x, residual = layer.run(normed, residual, rows, memory, self.behind + i, self.rope)
        return add_norm(x, residual, self.norm, self.eps)
