"""Submit a request to an engine: choose the engine, check the prompts, start the streams."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from peagle.core import Sampling
from peagle.server.engines.engine_slot import RequestTiming
from peagle.server.front.engine_backend import EngineBackend
from peagle.server.front.generation_params import GenerationParams
from peagle.server.front.remote_slot import RemoteSlot
from peagle.server.http.errors import ApiError
from peagle.server.http.schema import ChatRequest, CompletionRequest
from peagle.server.messages import ProbedGrammar
from peagle.server.openai.answer import Answer
from peagle.server.openai.choice import Choice
from peagle.server.openai.prompts import check_prompt
from peagle.server.openai.response_format import AnswerRules, compile_grammar

if TYPE_CHECKING:
    from peagle.engine.stream import TokenLogprob

SEED_RANGE = 2**63


async def submit(
    backend: EngineBackend,
    body: ChatRequest | CompletionRequest,
    prompts: list[list[int]],
    cache_salt: str = "",
    rules: AnswerRules | None = None,
    learn: bool = False,
) -> Answer:
    """Start the answers to these prompts, `body.choices` for each.

    `cache_salt`: see http/cache_salt.py. `learn`: they may be stored, see learning/consent.py.
    """
    rules = rules or AnswerRules()
    extension = body.peagle
    key = backend.engines.choose(
        extension.method if extension else None, extension.k if extension else None
    )
    requests = len(prompts) * body.choices
    max_queue = backend.settings.max_queue
    if requests > max_queue:
        raise ApiError(400, f"{requests} answers at once: the queue holds {max_queue}")
    async with backend.engines.slot(key, requests) as slot:
        for ids in prompts:
            check_prompt(slot, ids, None if body.ends_with_context else body.max_new_tokens)
        grammar = await compile_grammar(backend, body, rules)
        prompt_logprobs = await score_prompts(backend, slot, body, prompts)
        choices: list[Choice] = []
        with abort_on_error(choices):
            for ids, logprobs in zip(prompts, prompt_logprobs, strict=True):
                room = slot.context - len(ids)
                params = replace(
                    generation_params(body, room, grammar, cache_salt),
                    thinking=rules.thinking_for(grammar),
                    shows_special_tokens=rules.shows_special_tokens,
                    learn=learn,
                )
                for i in range(body.choices):
                    choice = await start_choice(backend, slot, ids, with_seed(params, i))
                    choice.index = len(choices)
                    choice.prompt_logprobs = logprobs
                    choices.append(choice)
            backend.drain.check_accepting()  # The server may have begun to shut down meanwhile.
            return Answer(backend, slot, choices)


@contextmanager
def abort_on_error(choices: list[Choice]) -> Iterator[None]:
    """Leave no request behind in the engine if a later one is refused."""
    try:
        yield
    except BaseException:
        for choice in choices:
            if choice.stream is not None:
                choice.stream.abort()
        raise


async def start_choice(
    backend: EngineBackend, slot: RemoteSlot, ids: list[int], params: GenerationParams
) -> Choice:
    if params.max_tokens == 0:
        return Choice(ids, RequestTiming(time.monotonic()), finish_reason="length")
    stream, timing = await backend.engines.add(slot, ids, params)
    return Choice(ids, timing, stream)


def generation_params(
    body: ChatRequest | CompletionRequest,
    room: int,
    grammar: ProbedGrammar | None,
    cache_salt: str,
) -> GenerationParams:
    """The request for the engine, with OpenAI's defaults. `room`: tokens left in the context."""
    max_tokens = room if body.max_new_tokens is None else body.max_new_tokens
    return GenerationParams(
        max_tokens=min(max_tokens, room) if body.ends_with_context else max_tokens,
        min_tokens=body.min_tokens or 0,
        sampling=sampling_params(body),
        stop=body.stop_strings,
        stop_ids=frozenset(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        include_stop=bool(body.include_stop_str_in_output),
        logprobs=body.logprobs_count,
        grammar=grammar,
        user=body.user or "",
        cache_salt=cache_salt,
    )


def sampling_params(body: ChatRequest | CompletionRequest) -> Sampling:
    penalty = body.repetition_penalty
    return Sampling(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(body.top_k or 0, 0),
        min_p=body.min_p or 0.0,
        seed=body.seed,
        repetition_penalty=1.0 if penalty is None else penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=body.logit_bias or {},
    )


def with_seed(params: GenerationParams, i: int) -> GenerationParams:
    """The same for choice i of a prompt: each choice has its own seed."""
    seed = params.sampling.seed
    if seed is None:
        return params
    return replace(params, sampling=replace(params.sampling, seed=(seed + i) % SEED_RANGE))


async def score_prompts(
    backend: EngineBackend,
    slot: RemoteSlot,
    body: ChatRequest | CompletionRequest,
    prompts: Sequence[list[int]],
) -> "Sequence[list[TokenLogprob] | None]":
    """The prompts' own log-probabilities, if they are echoed with them."""
    if not isinstance(body, CompletionRequest) or not body.echo or body.logprobs is None:
        return [None] * len(prompts)
    scorings = [
        asyncio.ensure_future(backend.engines.score(slot, ids, body.logprobs)) for ids in prompts
    ]
    try:
        return await asyncio.gather(*scorings)
    finally:
        for scoring in scorings:
            scoring.cancel()  # If one is refused, so is the request.
