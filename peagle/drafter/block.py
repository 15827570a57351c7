"""One Llama-like layer with switches, of which every drafter is built.

Rows are flat, [R, ...], without a batch axis. A layer has neither a cache nor a mask: the caller
passes `attend`, which receives the layer's q [R, heads, head_dim] and k, v [R, kv_heads, head_dim]
and returns [R, heads, head_dim].
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from peagle.drafter.config import DrafterConfig
from peagle.drafter.linear import Linear

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # (layer, q, k, v) -> attention output
Rope = tuple[Tensor, Tensor]  # cos, sin: [R, 1, rotated dims] each


class Attention(nn.Module):
    def __init__(self, config: DrafterConfig, input_size: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        bias = config.attention_bias  # as in vLLM, the switch covers all four projections
        self.q_proj = Linear(input_size, q_size, bias=bias)
        self.k_proj = Linear(input_size, kv_size, bias=bias)
        self.v_proj = Linear(input_size, kv_size, bias=bias)
        self.o_proj = Linear(q_size, config.hidden_size, bias=bias)

    def forward(self, x: Tensor, rope: Rope, layer: int, attend: Attend) -> Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_dim))
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(attend(layer, rotate(q, rope), rotate(k, rope), v).flatten(-2))


class Mlp(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One decoder layer.

    Layer 0 is the fused layer of EAGLE-3: its attention reads cat[norm(embedding), norm(hidden)],
    which is 2d wide. The other layers are plain pre-norm Llama layers over the hidden state.
    """

    def __init__(self, config: DrafterConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.norm_before_residual = config.norm_before_residual
        d = config.hidden_size
        eps = config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(d, eps)
        self.hidden_norm = nn.RMSNorm(d, eps) if layer == 0 else None
        self.self_attn = Attention(config, 2 * d if layer == 0 else d)
        self.post_attention_layernorm = nn.RMSNorm(d, eps)
        self.mlp = Mlp(config)

    def forward(self, hidden: Tensor, embeds: Tensor, rope: Rope, attend: Attend) -> Tensor:
        """hidden, embeds [R, d] -> hidden [R, d]."""
        if self.hidden_norm is not None:
            normed = self.hidden_norm(hidden)
            residual = normed if self.norm_before_residual else hidden
            x = torch.cat([self.input_layernorm(embeds), normed], -1)  # [R, 2d]
        else:
            residual = hidden
            x = self.input_layernorm(hidden)
        hidden = residual + self.self_attn(x, rope, self.layer, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotary embedding of x [R, heads, head_dim], rotate-half convention.

    With fewer angles than dimensions, the dimensions behind them do not rotate (Phi-4-mini). The
    angles may have a wider dtype than x, under autocast.
    """
    cos, sin = rope
    rotated_dims = cos.shape[-1]
    if rotated_dims < x.shape[-1]:
        rotated = rotate(x[..., :rotated_dims], rope)
        return torch.cat([rotated, x[..., rotated_dims:]], -1)
    left, right = x.chunk(2, -1)
    return (x * cos + torch.cat([-right, left], -1) * sin).to(x.dtype)
