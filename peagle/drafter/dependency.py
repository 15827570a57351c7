"""Drafts that know each other: a low-rank correction of a row by the draft before it, without another pass.

Row k >= 1 of a block knows nothing of what row k - 1 drafted. With that draft x the row becomes

    n' = n + out(silu(here(n) + before(e)))        e: the embedding of x, scaled to a root mean square of 1

and its logits lm_head(n') = lm_head(n) + (lm_head out) silu(...): a correction of rank r. It is applied to a row's
likeliest candidates only, so that all pairs of neighboring candidates are scored at once, and a chain or a tree is
read off the scores.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, silu


class Dependency(nn.Module):
    def __init__(self, d: int, rank: int) -> None:
        super().__init__()
        self.before = nn.Linear(d, rank, bias=False)
        self.here = nn.Linear(d, rank, bias=False)
        self.out = nn.Linear(rank, d, bias=False)
        nn.init.zeros_(self.out.weight)  # it begins as no correction

    def forward(self, normed: Tensor, embeds: Tensor) -> Tensor:
        """normed [R, d], embeds [R, d] of the draft before each row -> the corrected rows [R, d]."""
        return normed + self.out(silu(self.here(normed) + self.before(scaled(embeds))))

    def tables(self, embed_tokens: Tensor, lm_head: Tensor) -> tuple[Tensor, Tensor]:
        """What a correction needs of each token: as the draft before [vocabulary, r], as a candidate [drafts, r]."""
        return linear(scaled(embed_tokens), self.before.weight), linear(lm_head, self.out.weight.T)

    def score_pairs(self, normed: Tensor, logits: Tensor, embeds: Tensor, heads: Tensor) -> Tensor:
        """`pair_logits` of blocks of rows normed [B, K, d]: logits [B, K, M] of their candidates, which have the
        embeddings `embeds` and the rows `heads` of lm_head [B, K, M, d]."""
        dtype = self.out.weight.dtype  # while it is trained, the target's tables may be in another
        return pair_logits(
            logits, self.here(normed.to(dtype)), *self.tables(embeds.to(dtype), heads.to(dtype))
        )


def scaled(embeds: Tensor) -> Tensor:
    return rms_norm(embeds, embeds.shape[-1:], eps=1e-6)


def pair_logits(logits: Tensor, here: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """logits [B, K, M] of the candidates; here [B, K, r] of each row; before, after [B, K, M, r]: each candidate's rows
    of the two tables -> [B, K, M, M]: of candidate i behind candidate j of the row before, corrected from row 1 on."""
    first = logits[:, :1, None].expand(-1, -1, logits.shape[2], -1)
    between = silu(here[:, 1:, None] + before[:, :-1])  # [B, K - 1, M before, r]
    return torch.cat([first, logits[:, 1:, None] + between @ after[:, 1:].transpose(-1, -2)], 1)


def chain(pairs: Tensor) -> Tensor:
    """pairs [B, K, M, M] -> [B, K]: the likeliest candidate, then the likeliest behind it, and so on."""
    rows = torch.arange(len(pairs), device=pairs.device)
    chosen = [pairs[:, 0, 0].argmax(-1)]
    for k in range(1, pairs.shape[1]):
        chosen.append(pairs[rows, k, chosen[-1]].argmax(-1))
    return torch.stack(chosen, 1)
