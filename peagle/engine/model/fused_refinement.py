"""FusedRefinement: the layer of a refinement (drafter/refinement.py) with the engine's kernels.

Its rows see their own block only, so it needs no pages. `Drafter.refine_rows` is its reference.
"""

from torch import Tensor, arange, ones_like

from peagle.drafter import Drafter
from peagle.drafter.block import Rope, rotate
from peagle.drafter.refinement import Refinement, attend_in_blocks
from peagle.engine.model.fused_llama import build_layer, fuse_inputs
from peagle.kernels.triton.add_norm import add_norm


class FusedRefinement:
    def __init__(self, drafter: Drafter, refinement: Refinement) -> None:
        assert refinement.hidden_norm is not None
        self.drafter = drafter
        self.eps = drafter.config.rms_norm_eps
        self.layer = build_layer(refinement, self.eps, drafter.config.head_dim)
        self.hidden_norm = refinement.hidden_norm.weight.detach()
        self.ones = ones_like(self.hidden_norm)
        self.angles: dict[int, Rope] = {}  # by K

    def quantize(self) -> None:
        """Multiply in int8 from now on."""
        self.layer = self.layer.quantized()

    def __call__(self, normed: Tensor, previous_ids: Tensor, k: int) -> Tensor:
        """One pass over whole blocks of k rows: normed [B * K, d] -> refined rows [B * K, d].

        previous_ids [B * K]: the newest token of each block, then its drafts but the last.
        """
        layer = self.layer
        embeds = self.drafter.token_embeddings(previous_ids)
        fused_input = fuse_inputs(embeds, normed, layer.input_norm, self.hidden_norm, self.eps)
        qkv = layer.qkv(fused_input).unflatten(1, (-1, layer.head_dim))
        rotated = layer.heads.num_heads + layer.heads.num_kv_heads
        blocks = qkv[:, :rotated].unflatten(0, (-1, k))  # [B, K, heads, head_dim]
        query_and_key = rotate(blocks, self.block_angles(normed, k)).flatten(0, 1)
        query = query_and_key[:, : layer.heads.num_heads]
        key = query_and_key[:, layer.heads.num_heads :]
        attended = attend_in_blocks(k)(0, query, key, qkv[:, rotated:])
        x, residual = add_norm(
            layer.out.split_k(attended.flatten(1)), normed, layer.post_attention_norm, self.eps
        )
        return add_norm(layer.mlp(x), residual, self.ones, self.eps)[1]

    def block_angles(self, normed: Tensor, k: int) -> Rope:
        """The angles of depths 0..k-1. They are cached: a CUDA graph reads them at their address.

        The warm-up run before a capture computes them.
        """
        if k not in self.angles:
            self.angles[k] = self.drafter.rope_angles(normed, arange(k, device=normed.device))
        return self.angles[k]
