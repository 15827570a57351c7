"""The definition of right: speculative decoding without a cache, a page long and slow.

Everything is recomputed from the tokens in every step, and the drafter's rows are written down one by one as the table
says (rows.py has a worked example). The target has consumed x_0..x_{n-1}, x_n is the newest token:

    row j = 0..n-1      emb(x_{j+1})   g_j           position j        row n-1 predicts draft 1
    row n-1+i, i >= 1   emb(mask)      mask_hidden   position n-1+i    predicts draft i+1   (P-EAGLE)
                        emb(draft i)   own output                                           (EAGLE-3)

In a bidirectional drafter the mask rows see each other; with a dependency the drafts are read off one after another.
"""

import torch
from torch import Tensor

from peagle.core import Sampling, Step
from peagle.drafter import Drafter
from peagle.drafter.model import causal_attend, masked_attend, row_mask
from peagle.reference.sampling_rule import choose, uniforms
from peagle.target import Target


@torch.inference_mode()
def propose(drafter: Drafter, g: Tensor, ids: Tensor, k: int) -> Tensor:
    """The k drafts after ids = x_0..x_n, given g = g_0..g_{n-1}."""
    rows, hidden = ids[1:], drafter.combine_hidden_states(g)
    if drafter.config.method == "p-eagle":
        assert drafter.mask_hidden is not None and drafter.config.mask_token_id is not None
        rows = torch.cat([rows, rows.new_full((k - 1,), drafter.config.mask_token_id)])
        hidden = torch.cat([hidden, drafter.combine_hidden_states(drafter.mask_hidden.expand(k - 1, -1))])
        block = k - 1 if drafter.config.bidirectional else 0
        return drafter.drafts(run(drafter, rows, hidden, block)[0][None, -k:])[0]
    for _ in range(k):
        normed, feedback = run(drafter, rows, hidden)
        rows = torch.cat([rows, drafter.greedy_token_ids(normed[-1:])])
        hidden = torch.cat([hidden, feedback[-1:]])
    return rows[-k:]


def run(drafter: Drafter, rows: Tensor, hidden: Tensor, block: int = 0) -> tuple[Tensor, Tensor]:
    """Causal, but that the last `block` rows see each other."""
    attend = (
        masked_attend(row_mask(len(rows), block=block, device=rows.device))
        if block
        else causal_attend
    )
    positions = torch.arange(len(rows), device=rows.device)
    return drafter(drafter.embed(rows), hidden, positions, attend)


def decode(
    target: Target,
    drafter: Drafter | None,
    prompt: list[int],
    k: int,
    max_tokens: int,
    sampling: Sampling,
) -> list[Step]:
    """Steps of at least max_tokens tokens in all; no stop tokens. Each is one target pass over everything so far."""
    noise = uniforms(sampling.seed, max_tokens + k + 1)
    ids, drafts = (
        torch.tensor(prompt, device=target.device),
        torch.empty(0, dtype=torch.long, device=target.device),
    )
    steps: list[Step] = []
    done = 0
    while done < max_tokens:
        out = target.forward(torch.cat([ids, drafts]), keep=len(drafts) + 1)
        tokens = choose(out.logits, sampling, noise[done : done + len(out.logits)])
        kept = 0
        while kept < len(drafts) and tokens[kept] == drafts[kept]:
            kept += 1
        steps.append(Step(tuple(tokens[: kept + 1].tolist()), len(drafts), kept))
        done += kept + 1
        g = out.hidden[: len(ids) + kept]  # of the tokens that stay; rejected ones leave no trace
        ids = torch.cat([ids, tokens[: kept + 1]])
        drafts = propose(drafter, g, ids, k) if drafter else drafts
    return steps
