"""Repeat every pass of vLLM with the cache-free reference and with the cached step loop."""

from dataclasses import dataclass

import torch
from parity_run import Report, Request
from torch import Tensor

from peagle.core import Sampling, Step
from peagle.drafter import Drafter
from peagle.reference import reference
from peagle.reference.decode import decode
from peagle.reference.proposer import Proposer, Verified, proposer_for
from peagle.target import Target


@dataclass(slots=True)
class Score:
    """The numbers of equal results."""

    k: int
    requests: int
    proposals: int = 0  # all proposals of vLLM, also the last of a request, which is not verified
    equal: int = 0  # proposals for which the reference gives the same K drafts
    embedded: int = 0  # the same, if it embeds the same ids at chunk ends as vLLM: see vllm_ids
    late: int = 0  # control: the same with hidden states one position late, which must be rare
    looped: int = (
        0  # proposals for which the step loop gives the same drafts, without the last pass
    )
    loop_total: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    passes_equal: bool = (
        True  # whether the step loop has the same tokens, drafts and accepted drafts in each pass
    )
    output_equal: bool = True  # whether plain greedy decoding gives the same tokens
    counters_equal: bool = True  # whether the counters of vLLM equal ours


def compare(target: Target, drafter: Drafter, k: int, report: Report) -> Score:
    target.tap(drafter.config.aux_layer_ids or ())
    score = Score(k, len(report.requests))
    for request in report.requests:
        replay(target, drafter, request, score)
        step_loop(target, drafter, request, score)
        plain = decode(target, None, request.prompt, 0, request.max_tokens, Sampling())
        score.output_equal &= [token for step in plain for token in step.tokens] == request.output
    count(report, score)
    return score


def replay(target: Target, drafter: Drafter, request: Request, score: Score) -> None:
    """Propose from the same prefix as each proposal of vLLM.

    The prefix is the prompt and all tokens so far; the target has not consumed the newest token.
    """
    prefix = list(request.prompt)
    for target_pass in request.passes:
        prefix += target_pass.tokens
        ids = torch.tensor(prefix)
        g = target.forward(ids[:-1]).hidden

        def is_equal(g: Tensor, ids: Tensor, drafts: list[int] = target_pass.drafts) -> bool:
            return reference.propose(drafter, g, ids, score.k).tolist() == drafts

        score.proposals += 1
        score.equal += is_equal(g, ids)
        score.embedded += is_equal(g, vllm_ids(ids, request))
        score.late += is_equal(g.roll(1, 0), ids)
    assert prefix[len(request.prompt) :][: request.max_tokens] == request.output


def vllm_ids(ids: Tensor, request: Request) -> Tensor:
    """The ids that vLLM 0.32.0 embeds for its drafter.

    The row at the end of a chunk of a prompt should embed the token that follows, x_{j+1}. vLLM
    embeds the prompt's last token there (it takes the newest known token for the next one), and
    the KV entry of that row is not computed again.
    """
    ids = ids.clone()
    ids[request.chunk_ends] = request.prompt[-1]
    return ids


class Recorded:
    """A proposer that records its drafts."""

    def __init__(self, proposer: Proposer) -> None:
        self.proposer = proposer
        self.drafts: list[list[int]] = []

    def propose(self, verified: Verified, k: int) -> Tensor:
        drafts = self.proposer.propose(verified, k)
        self.drafts.append(drafts.tolist())
        return drafts


def step_loop(target: Target, drafter: Drafter, request: Request, score: Score) -> None:
    recorded = Recorded(proposer_for(drafter))
    steps = list(decode(target, recorded, request.prompt, score.k, request.max_tokens, Sampling()))
    theirs = [target_pass.drafts for target_pass in request.passes[:-1]]
    score.loop_total += len(theirs)
    score.looped += sum(a == b for a, b in zip(recorded.drafts, theirs, strict=False))
    score.passes_equal &= steps == steps_of(request, score.k)


def steps_of(request: Request, k: int) -> list[Step]:
    """vLLM's passes in the form of steps of the step loop.

    Tokens are cut at max_tokens; the counts are those of the whole pass.
    """
    steps = []
    left = request.max_tokens
    for i, target_pass in enumerate(request.passes):
        tokens = target_pass.tokens
        steps.append(Step(tuple(tokens[:left]), k if i else 0, len(tokens) - 1))
        left -= len(tokens)
    return steps


def count(report: Report, score: Score) -> None:
    """vLLM counts verified drafts: all passes of a request except the first, its prefill."""
    accepted = [
        len(target_pass.tokens) - 1
        for request in report.requests
        for target_pass in request.passes[1:]
    ]
    score.draft_tokens = score.k * len(accepted)
    score.accepted = sum(accepted)
    ours = {
        "drafts": len(accepted),
        "draft_tokens": score.draft_tokens,
        "accepted": score.accepted,
        "accepted_per_position": [sum(number > i for number in accepted) for i in range(score.k)],
    }
    score.counters_equal = ours.items() <= report.counters.items()
