"""The step loop for one request: prefill -> draft -> verify -> accept, as a stream of steps.

With positions 0..n-1 consumed and x_n the newest token, one step drafts d_1..d_K, lets the target consume x_n,
d_1..d_K in one pass, and reads its own tokens t_0..t_K there. The longest prefix with d_i == t_{i-1} is kept (a
tokens), then t_a follows as the bonus; the target's cache is rolled back to n + 1 + a. Without a proposer K is 0:
plain decoding.
"""

from collections.abc import Iterator

import torch

from peagle.core import Sampling, Step
from peagle.errors import UserError
from peagle.reference.proposer import Proposer, Verified
from peagle.reference.sampling_rule import accept, choose, uniforms
from peagle.target import Target


def decode(
    target: Target,
    proposer: Proposer | None,
    prompt: list[int],
    k: int,
    max_tokens: int,
    sampling: Sampling,
    stop_ids: frozenset[int] = frozenset(),
) -> Iterator[Step]:
    """Steps until a stop token, `max_tokens`, or the end of the context. The first step is the prefill's token."""
    check_request(target, prompt, max_tokens)
    max_tokens = min(max_tokens, target.context - len(prompt))
    noise = uniforms(sampling.seed, max_tokens + k + 1)
    cache = target.new_cache()
    ids = torch.tensor(prompt, device=target.device)
    out = target.forward(ids, cache, keep=1)
    tokens = choose(out.logits, sampling, noise[:1])
    verified = Verified(ids, out.hidden, first=0, rejected=0, newest=tokens)
    step = cut(tokens.tolist(), 0, 0, max_tokens, stop_ids)
    emitted, n = 1, len(prompt)
    yield step
    while emitted < max_tokens and step.tokens[-1] not in stop_ids:
        room = target.context - n - 1
        drafts = proposer.propose(verified, min(k, room)) if proposer and room else ids[:0]
        block = torch.cat([verified.newest, drafts])
        out = target.forward(block, cache)
        tokens = choose(out.logits, sampling, noise[emitted : emitted + len(block)])
        kept = accept(drafts, tokens)
        cache.rollback(n + 1 + kept)
        verified = Verified(
            block, out.hidden, first=n, rejected=len(drafts) - kept, newest=tokens[kept : kept + 1]
        )
        step = cut(tokens[: kept + 1].tolist(), len(drafts), kept, max_tokens - emitted, stop_ids)
        emitted, n = emitted + len(step.tokens), n + 1 + kept
        yield step


def cut(
    tokens: list[int], drafted: int, accepted: int, limit: int, stop_ids: frozenset[int]
) -> Step:
    """The step as the request receives it: nothing behind a stop token or past the limit."""
    end = next((i + 1 for i, token in enumerate(tokens) if token in stop_ids), len(tokens))
    return Step(tuple(tokens[: min(end, limit)]), drafted, accepted)


def check_request(target: Target, prompt: list[int], max_tokens: int) -> None:
    if max_tokens < 1:
        raise UserError(f"max_tokens is {max_tokens}: ask for at least one token")
    if not prompt:
        raise UserError("the prompt is empty: give at least one token")
    if len(prompt) >= target.context:
        raise UserError(
            f"the prompt has {len(prompt)} tokens, the target's context holds {target.context}"
            " and needs room for an answer: shorten the prompt"
        )
    if bad := [i for i in prompt if not 0 <= i < target.vocab_size]:
        raise UserError(
            f"token ids {bad[:5]} are outside the target's vocabulary of {target.vocab_size}"
        )
