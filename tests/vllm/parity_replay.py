"""The comparison: every pass vLLM made, made again by the cache-free reference and by the cached step loop."""

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
    """What was equal, of how many."""

    k: int
    requests: int
    proposals: int = 0  # all of vLLM's; the last one of each request, which nobody verified, too
    equal: int = 0  # the reference proposes the same, all K drafts
    embedded: int = 0  # it does when it embeds at chunk ends what vLLM embeds there: see vllm_ids
    late: int = 0  # it does with the hidden states one position late: a control, must be few
    looped: int = 0  # the step loop proposes the same ...
    loop_total: int = 0  # ... but nothing after the last pass
    draft_tokens: int = 0
    accepted: int = 0
    passes_equal: bool = True  # the step loop: the same tokens, drafted and accepted in every pass
    output_equal: bool = True  # plain greedy decoding: the same tokens
    counters_equal: bool = True  # vLLM's own counters say what we counted


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
    """Before each of vLLM's proposals: prefix = prompt + all tokens so far, the newest of them not consumed."""
    prefix = list(request.prompt)
    for one in request.passes:
        prefix += one.tokens
        ids = torch.tensor(prefix)
        g = target.forward(ids[:-1]).hidden

        def same(g: Tensor, ids: Tensor, theirs: list[int] = one.drafts) -> bool:
            return reference.propose(drafter, g, ids, score.k).tolist() == theirs

        score.proposals += 1
        score.equal += same(g, ids)
        score.embedded += same(g, vllm_ids(ids, request))
        score.late += same(g.roll(1, 0), ids)
    assert prefix[len(request.prompt) :][: request.max_tokens] == request.output


def vllm_ids(ids: Tensor, request: Request) -> Tensor:
    """The ids whose embeddings vLLM 0.32.0 gives its drafter.

    The row at the end of a piece of a prompt should embed the token that follows, x_{j+1}. vLLM embeds the prompt's
    last token there (it takes the newest token it knows for the next one), and that row's KV stays as it is.
    """
    ids = ids.clone()
    ids[request.chunk_ends] = request.prompt[-1]
    return ids


class Recorded:
    """A proposer that remembers its drafts."""

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
    theirs = [one.drafts for one in request.passes[:-1]]
    score.loop_total += len(theirs)
    score.looped += sum(a == b for a, b in zip(recorded.drafts, theirs, strict=False))
    score.passes_equal &= steps == steps_of(request, score.k)


def steps_of(request: Request, k: int) -> list[Step]:
    """vLLM's passes as our step loop reports them: the tokens cut at max_tokens, the counts those of the whole pass."""
    steps, left = [], request.max_tokens
    for i, one in enumerate(request.passes):
        steps.append(Step(tuple(one.tokens[:left]), k if i else 0, len(one.tokens) - 1))
        left -= len(one.tokens)
    return steps


def count(report: Report, score: Score) -> None:
    """vLLM counts verified drafts: all passes of a request but its first, which reads the prompt."""
    accepted = [len(one.tokens) - 1 for request in report.requests for one in request.passes[1:]]
    score.draft_tokens, score.accepted = score.k * len(accepted), sum(accepted)
    ours = {
        "drafts": len(accepted),
        "draft_tokens": score.draft_tokens,
        "accepted": score.accepted,
        "accepted_per_position": [sum(kept > i for kept in accepted) for i in range(score.k)],
    }
    score.counters_equal = ours.items() <= report.counters.items()
