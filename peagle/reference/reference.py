"""The definition of correct output: speculative decoding without any cache, short and slow.

Every step recomputes everything from the tokens. Names, as in the paper:

    x_0..x_{n-1}   tokens that the target has consumed
    x_n            the newest token, not consumed yet
    g_p            the tapped residual streams of the target at position p, side by side: [taps * d]
    K              number of drafts of a step

Row layout of the drafter (row_layout.py has a worked example). Ids are shifted by one, hidden
states and positions are not; K drafts need K - 1 mask rows:

    row                 embedding      hidden        position   predicts
    j = 0..n-2          emb(x_{j+1})   g_j           j          nothing, context only
    n-1                 emb(x_n)       g_{n-1}       n-1        draft 1
    n-1+i, i = 1..K-1   emb(mask)      mask_hidden   n-1+i      draft i+1    (P-EAGLE)
                        emb(draft i)   own output    n-1+i      draft i+1    (EAGLE-3)

Every row sees itself and all rows before it; with a sliding window of W, only itself and the W - 1
positions before it. In a bidirectional drafter the mask rows also see each other; with a
dependency, each draft corrects the next one without another pass; with a convolution, a mask row
adds the states of the row before it; with a refinement, the K rows that predict drafts run through
one more layer that knows the drafts before them.

Acceptance rule: the target consumes x_n and the drafts d_1..d_K in one pass and chooses its own
tokens t_0..t_K there. The longest prefix with d_i == t_{i-1} is accepted, say a drafts; then t_a
follows as the bonus token. The output is always t_0..t_a: the target's own tokens.
"""

import torch
from torch import Tensor

from peagle.core import Sampling, Step
from peagle.drafter import Drafter
from peagle.drafter.block import Attend
from peagle.drafter.convolution import rows_before
from peagle.drafter.model import causal_attend, masked_attend, row_mask
from peagle.reference.sampling_rule import choose, uniforms
from peagle.target import Target


@torch.inference_mode()
def propose(drafter: Drafter, g: Tensor, ids: Tensor, k: int) -> Tensor:
    """The k drafts [k] after ids = x_0..x_n [n + 1], given g = g_0..g_{n-1} [n, taps * d]."""
    row_ids = ids[1:]  # [n]
    hidden = drafter.combine_hidden_states(g)  # [n, d]
    if drafter.config.method == "p-eagle":
        assert drafter.mask_hidden is not None and drafter.config.mask_token_id is not None
        mask_ids = row_ids.new_full((k - 1,), drafter.config.mask_token_id)
        mask_hidden = drafter.combine_hidden_states(drafter.mask_hidden.expand(k - 1, -1))
        block = k - 1 if drafter.config.bidirectional else 0
        normed, _ = run_drafter(
            drafter, torch.cat([row_ids, mask_ids]), torch.cat([hidden, mask_hidden]), block, k - 1
        )  # [n + k - 1, d]
        return drafter.drafts(drafter.refine(normed[None, -k:], ids[-1:]))[0]
    for _ in range(k):
        normed, feedback = run_drafter(drafter, row_ids, hidden)
        row_ids = torch.cat([row_ids, drafter.greedy_token_ids(normed[-1:])])
        hidden = torch.cat([hidden, feedback[-1:]])
    return row_ids[-k:]


def run_drafter(
    drafter: Drafter, row_ids: Tensor, hidden: Tensor, block: int = 0, mask_rows: int = 0
) -> tuple[Tensor, Tensor]:
    """Run all rows, row_ids [R] and hidden [R, d], with causal attention, perhaps in a window.

    The last `block` rows also see each other; the last `mask_rows` rows are mask rows. Returns
    (normed output, hidden state to feed back).
    """
    attend: Attend = causal_attend
    window = drafter.config.sliding_window
    if block or window is not None:
        mask = row_mask(len(row_ids), block=block, device=row_ids.device, window=window)
        attend = masked_attend(mask)
    positions = torch.arange(len(row_ids), device=row_ids.device)
    previous = rows_before(mask_rows)
    return drafter(drafter.embed(row_ids), hidden, positions, attend, previous)


def decode(
    target: Target,
    drafter: Drafter | None,
    prompt: list[int],
    k: int,
    max_tokens: int,
    sampling: Sampling,
) -> list[Step]:
    """Steps with at least max_tokens tokens in total, or up to the end of the context.

    Each step is one target pass over everything so far. Stop tokens have no effect.
    """
    max_tokens = min(max_tokens, target.context - len(prompt))
    noise = uniforms(sampling.seed, max_tokens + k + 1)  # one number per position of the answer
    ids = torch.tensor(prompt, device=target.device)  # [n + 1] x_0..x_n
    drafts = ids[:0]  # [K] d_1..d_K; none in the first step
    steps: list[Step] = []
    done = 0
    while done < max_tokens:
        # Verify: the rows of x_n, d_1..d_K choose t_0..t_K.
        out = target.forward(torch.cat([ids, drafts]), keep=len(drafts) + 1)
        tokens = choose(out.logits, sampling, noise[done : done + len(out.logits)])
        # Accept the longest prefix of the drafts that the target chose, too.
        accepted = 0
        while accepted < len(drafts) and tokens[accepted] == drafts[accepted]:
            accepted += 1
        emitted = tokens[: accepted + 1]
        steps.append(Step(tuple(emitted.tolist()), len(drafts), accepted))
        done += accepted + 1
        # Draft from the tokens that stay; rejected ones leave no trace.
        g = out.hidden[: len(ids) + accepted]
        ids = torch.cat([ids, emitted])
        room = target.context - len(ids)  # the target has no positions beyond the context
        drafts = propose(drafter, g, ids, min(k, room)) if drafter and room > 0 else drafts[:0]
    return steps
