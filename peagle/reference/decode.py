"""The step loop for one request with KV caches: prefill -> draft -> verify -> accept.

The target has consumed positions 0..n-1 and x_n is the newest token. One step drafts d_1..d_K, lets
the target consume x_n, d_1..d_K in one pass and chooses the target's tokens t_0..t_K there. The
longest prefix with d_i == t_{i-1} is accepted (a drafts), then t_a follows as the bonus token, and
the target's cache is rolled back to n + 1 + a positions. Without a proposer K is 0: plain decoding.
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
    """Yield steps until a stop token, `max_tokens`, or the end of the context.

    The first step is the token of the prefill.
    """
    check_request(target, prompt, max_tokens)
    max_tokens = min(max_tokens, target.context - len(prompt))
    noise = uniforms(sampling.seed, max_tokens + k + 1)  # one number per position of the answer
    cache = target.new_cache()
    ids = torch.tensor(prompt, device=target.device)
    out = target.forward(ids, cache, keep=1)
    tokens = choose(out.logits, sampling, noise[:1])
    verified = Verified(ids, out.hidden, first=0, rejected=0, newest=tokens)
    step = cut_step(tokens.tolist(), 0, 0, max_tokens, stop_ids)
    emitted = 1
    n = len(prompt)
    yield step
    while emitted < max_tokens and step.tokens[-1] not in stop_ids:
        room = target.context - n - 1
        drafts = proposer.propose(verified, min(k, room)) if proposer and room else ids[:0]
        block = torch.cat([verified.newest, drafts])  # x_n, d_1..d_K
        out = target.forward(block, cache)
        tokens = choose(out.logits, sampling, noise[emitted : emitted + len(block)])  # t_0..t_K
        accepted = accept(drafts, tokens)
        cache.rollback(n + 1 + accepted)
        verified = Verified(
            block,
            out.hidden,
            first=n,
            rejected=len(drafts) - accepted,
            newest=tokens[accepted : accepted + 1],
        )
        own = tokens[: accepted + 1].tolist()
        step = cut_step(own, len(drafts), accepted, max_tokens - emitted, stop_ids)
        emitted += len(step.tokens)
        n += 1 + accepted
        yield step


def cut_step(
    tokens: list[int], drafted: int, accepted: int, limit: int, stop_ids: frozenset[int]
) -> Step:
    """The step as the request receives it: no tokens after a stop token or beyond the limit."""
    end = next((i + 1 for i, token in enumerate(tokens) if token in stop_ids), len(tokens))
    return Step(tuple(tokens[: min(end, limit)]), drafted, accepted)


def check_request(target: Target, prompt: list[int], max_tokens: int) -> None:
    if max_tokens < 1:
        raise UserError(f"`max_tokens` is {max_tokens}: ask for at least one token")
    if not prompt:
        raise UserError("the prompt is empty: give at least one token")
    if len(prompt) >= target.context:
        raise UserError(
            f"the prompt has {len(prompt)} tokens, but the target's context holds {target.context}"
            " and needs room for an answer: shorten the prompt"
        )
    if invalid := [i for i in prompt if not 0 <= i < target.vocab_size]:
        raise UserError(
            f"token ids {invalid[:5]} are outside the target's vocabulary of {target.vocab_size}:"
            " use ids of the target's tokenizer"
        )
