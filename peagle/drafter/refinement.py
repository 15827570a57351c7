"""Refinement of a block: one or two cheap passes in which rows know the drafts before them.

Row k >= 1 of a block does not know what the rows before it drafted. A pass runs one light layer
over the rows n_0..n_{K-1} of a block (the normed outputs of the drafter), causal inside the block:

    n_k' = n_k + layer([e_0, n_0], ..., [e_k, n_k])    e_0: the embedding of the newest token
                                                       e_k: the embedding of the draft of row k - 1

The layer is that of block.py with an MLP as wide as its rows. lm_head reads new drafts off n'. A
second pass embeds these, and refines n again, not n': the passes are a Jacobi iteration. After i
of them, drafts 1..i are those of drafting one token after the other.

    K = 3, newest token x, n gives a b c:  pass 1 embeds x a b and gives a' b' c',
                                           pass 2 embeds x a' b' and gives a' b" c"

Rows outside the block take no part: there is no KV cache, and no state from step to step. Chains
and trees, the dependency head and the confidence output read the rows of the last pass; the drafts
between two passes are the most likely tokens of each row, without the dependency.
"""

from dataclasses import replace

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from peagle.drafter.block import Attend, Block
from peagle.drafter.config import DrafterConfig
from peagle.drafter.linear import Linear


class Refinement(Block):
    """The layer of all passes; it starts without effect."""

    def __init__(self, config: DrafterConfig) -> None:
        light = replace(config, intermediate_size=config.hidden_size, norm_before_residual=False)
        super().__init__(light, layer=0)
        self.layer = config.num_layers  # its index in caches: behind the drafter's own layers
        for output in self.outputs:
            nn.init.zeros_(output.weight)

    @property
    def outputs(self) -> tuple[Linear, Linear]:
        """The projections that are added to the rows."""
        return self.self_attn.o_proj, self.mlp.down_proj


def attend_in_blocks(size: int) -> Attend:
    """Attention among rows of whole blocks of `size` rows: a row sees its block up to itself."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # [blocks, heads, size, head_dim]
        q, k, v = (x.unflatten(0, (-1, size)).transpose(1, 2) for x in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    return attend
