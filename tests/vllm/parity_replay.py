"""The comparison: every pass vLLM made, made again by the cache-free reference and by the cached step loop."""

from dataclasses import dataclass

import torch
from torch import Tensor

from parity_run import Pass, Report, Request
from peagle import reference
from peagle.core import Sampling, Step
from peagle.decode import decode
from peagle.drafter import Drafter
from peagle.proposer import Proposer, Verified, proposer_for
from peagle.target import Target


@dataclass(slots=True)
class Score:
    """What was equal, of how many."""

    requests: int = 0
    proposals: int = 0  # all of vLLM's, the last one of each request included, which nobody verified
    equal: int = 0  # the reference's own proposal is the same, all K drafts
    blurred: int = 0  # it would be the same with the hidden states one position late: a control, must be fewer
    cached: int = 0  # proposals of our step loop equal to vLLM's ...
    cached_total: int = 0  # ... which proposes nothing after the last pass
    draft_tokens: int = 0
    accepted: int = 0
    passes_equal: bool = True  # our step loop: the same tokens, drafted and accepted in every pass
    output_equal: bool = True  # plain greedy decoding: the same tokens
    counters_equal: bool = True  # vLLM's own counters say what we counted


def compare(target: Target, drafter: Drafter, k: int, report: Report) -> Score:
    target.tap(drafter.config.aux_layer_ids or ())
    score = Score(requests=len(report.requests))
    for request in report.requests:
        replay(target, drafter, k, request, score)
        step_loop(target, drafter, k, request, score)
        plain = decode(target, None, request.prompt, 0, request.max_tokens, Sampling())
        score.output_equal &= [token for step in plain for token in step.tokens] == request.output
    score.counters_equal = report.counters.items() >= expected_counters(report, k).items()
    return score


def replay(target: Target, drafter: Drafter, k: int, request: Request, score: Score) -> None:
    """Before each of vLLM's proposals: prefix = prompt + all tokens so far, the newest of them not consumed."""
    prefix = list(request.prompt)
    for one in request.passes:
        prefix += one.tokens
        ids = torch.tensor(prefix)
        g = target.forward(ids[:-1]).hidden
        score.proposals += 1
        score.equal += reference.propose(drafter, g, ids, k).tolist() == one.drafts
        score.blurred += reference.propose(drafter, g.roll(1, 0), ids, k).tolist() == one.drafts
    assert prefix[len(request.prompt) :][: request.max_tokens] == request.output


class Recorded:
    """A proposer that remembers its drafts."""

    def __init__(self, proposer: Proposer) -> None:
        self.proposer = proposer
        self.drafts: list[list[int]] = []

    def propose(self, verified: Verified, k: int) -> Tensor:
        drafts = self.proposer.propose(verified, k)
        self.drafts.append(drafts.tolist())
        return drafts


def step_loop(target: Target, drafter: Drafter, k: int, request: Request, score: Score) -> None:
    recorded = Recorded(proposer_for(drafter))
    steps = list(decode(target, recorded, request.prompt, k, request.max_tokens, Sampling()))
    score.cached_total += len(request.passes) - 1
    score.cached += sum(a == b.drafts for a, b in zip(recorded.drafts, request.passes[:-1], strict=False))
    score.draft_tokens += sum(step.drafted for step in steps)
    score.accepted += sum(step.accepted for step in steps)
    score.passes_equal &= steps == steps_of(request, k)


def steps_of(request: Request, k: int) -> list[Step]:
    """vLLM's passes as our step loop reports them: the tokens cut at max_tokens, the counts those of the whole pass."""
    steps, left = [], request.max_tokens
    for i, one in enumerate(request.passes):
        accepted = len(one.tokens) - 1
        steps.append(Step(tuple(one.tokens[:left]), k if i else 0, accepted))
        left -= len(one.tokens)
    return steps


def expected_counters(report: Report, k: int) -> dict[str, int | list[int]]:
    """vLLM counts verified drafts: all passes of a request but its first, which reads the prompt."""
    verified: list[Pass] = [one for request in report.requests for one in request.passes[1:]]
    accepted = [len(one.tokens) - 1 for one in verified]
    return {
        "drafts": len(verified),
        "draft_tokens": k * len(verified),
        "accepted": sum(accepted),
        "accepted_per_position": [sum(count > i for count in accepted) for i in range(k)],
    }
