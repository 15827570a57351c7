"""Dependency between drafts: a low-rank correction of a row by the previous draft, in one pass.

Row k >= 1 of a block does not know what row k - 1 drafted. Given that draft x, the row becomes

    n' = n + out(silu(here(n) + before(e)))    e: the embedding of x, scaled to root mean square 1

and its logits become lm_head(n') = lm_head(n) + (lm_head out) silu(...): a correction of rank r.
Only the likeliest candidates of a row are corrected, so all pairs of neighboring candidates are
scored at once, and a chain or a tree is read off the scores.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, silu

from peagle.drafter.linear import Linear


class Dependency(nn.Module):
    """The three matrices; their names are tensor names of the checkpoint."""

    def __init__(self, d: int, rank: int) -> None:
        super().__init__()
        self.before = Linear(d, rank, bias=False)
        self.here = Linear(d, rank, bias=False)
        self.out = Linear(rank, d, bias=False)
        nn.init.zeros_(self.out.weight)  # training starts without a correction

    def forward(self, normed: Tensor, embeds: Tensor) -> Tensor:
        """normed [R, d], embeds [R, d] of each row's previous draft -> corrected rows [R, d]."""
        return normed + self.out(silu(self.here(normed) + self.before(scale_to_unit_rms(embeds))))

    def tables(self, embed_tokens: Tensor, lm_head: Tensor) -> tuple[Tensor, Tensor]:
        """The terms of every token: as previous draft [V, r], as candidate [draft V, r]."""
        previous = self.before(scale_to_unit_rms(embed_tokens))
        candidate = linear(lm_head, self.out.weight.T.to(lm_head.dtype))
        return previous, candidate

    def score_pairs(
        self, normed: Tensor, logits: Tensor, embeds: Tensor, head_rows: Tensor
    ) -> Tensor:
        """Pair logits [B, K, M, M] of rows normed [B, K, d], see `pair_logits`.

        logits [B, K, M] are those of the candidates; embeds and head_rows [B, K, M, d] their
        embeddings and their rows of lm_head.
        """
        dtype = self.out.weight.dtype  # in training, the target's tables may have another dtype
        here = self.here(normed.to(dtype))
        previous, candidate = self.tables(embeds.to(dtype), head_rows.to(dtype))
        return pair_logits(logits, here, previous, candidate)


def scale_to_unit_rms(embeds: Tensor) -> Tensor:
    return rms_norm(embeds, embeds.shape[-1:], eps=1e-6)


def pair_logits(logits: Tensor, here: Tensor, previous: Tensor, candidate: Tensor) -> Tensor:
    """Logits [B, K, M, M] of candidate i (last axis) after candidate j of the previous row.

    logits [B, K, M] of the candidates, here [B, K, r] of each row, previous and candidate [B, K, M,
    r]: the candidates' rows of the two tables. Row 0 has no previous row and stays uncorrected.
    """
    first = logits[:, :1, None].expand(-1, -1, logits.shape[2], -1)
    between = silu(here[:, 1:, None] + previous[:, :-1])  # [B, K - 1, M previous, r]
    corrected = logits[:, 1:, None] + between @ candidate[:, 1:].transpose(-1, -2)
    return torch.cat([first, corrected], 1)


def select_chain(pair_logits: Tensor) -> Tensor:
    """[B, K, M, M] -> [B, K]: the likeliest candidate, then the likeliest after it, and so on."""
    batch = torch.arange(len(pair_logits), device=pair_logits.device)
    chosen = [pair_logits[:, 0, 0].argmax(-1)]
    for k in range(1, pair_logits.shape[1]):
        chosen.append(pair_logits[batch, k, chosen[-1]].argmax(-1))
    return torch.stack(chosen, 1)
