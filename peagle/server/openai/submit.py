"""From a request, read and checked, to an answer under way: which engine, which settings, one stream a choice."""

import asyncio
import time
from typing import TYPE_CHECKING, Any

from peagle.server.engines.driver import EngineSlot, Ticket
from peagle.server.engines.local_backend import LocalBackend
from peagle.server.http.errors import ApiError
from peagle.server.http.schema import ChatRequest, CompletionRequest
from peagle.server.openai.answer import Answer, Choice
from peagle.server.openai.prompts import check_room
from peagle.server.openai.response_format import compiled

if TYPE_CHECKING:
    from peagle.engine.stream import TokenLogprob
    from peagle.grammar import Grammar

SEEDS = 2**63


async def ask(
    front: LocalBackend, body: ChatRequest | CompletionRequest, prompts: list[list[int]]
) -> Answer:
    wanted = body.peagle
    key = front.engines.choose(wanted.method if wanted else None, wanted.k if wanted else None)
    if len(prompts) * body.choices > front.settings.max_queue:
        raise ApiError(
            400,
            f"{len(prompts) * body.choices} answers at once: the queue holds {front.settings.max_queue}",
        )
    async with front.engines.slot(key) as slot:
        context = slot.engine.context
        for ids in prompts:
            if not ids:
                raise ApiError(400, "the prompt has no tokens: give at least one", "prompt")
            check_room(context, len(ids), body.most)
            check_ids(ids, slot.engine.vocab_size)
        grammar = await compiled(front, body)
        scored = await scores(front, body, prompts)
        return begun(front, slot, body, prompts, grammar, scored)


def begun(
    front: LocalBackend,
    slot: EngineSlot,
    body: ChatRequest | CompletionRequest,
    prompts: list[list[int]],
    grammar: "Grammar | None",
    scored: "list[list[TokenLogprob] | None]",
) -> Answer:
    context, choices = slot.engine.context, list[Choice]()
    try:
        for number, ids in enumerate(prompts):
            for i in range(body.choices):
                choice = Choice(len(choices), ids, Ticket(time.monotonic()), scored=scored[number])
                if body.most == 0:
                    choice.reason = "length"
                else:
                    how = settings_of(body, i, len(ids), context) | {"grammar": grammar}
                    choice.stream, choice.ticket = front.engines.add(slot, ids, **how)
                choices.append(choice)
        front.drain.check()  # it may have begun while we waited
        return Answer(front, slot, choices)
    except BaseException:
        for choice in choices:
            if choice.stream is not None:
                choice.stream.abort()
        raise


def settings_of(
    body: ChatRequest | CompletionRequest, i: int, prompt: int, context: int
) -> dict[str, Any]:
    """The engine's settings of choice i; OpenAI's defaults. Each choice has a seed of its own."""
    given = {
        "temperature": body.temperature if body.temperature is not None else 1.0,
        "top_p": body.top_p if body.top_p is not None else 1.0,
        "top_k": max(body.top_k or 0, 0),
        "min_p": body.min_p or 0.0,
        "seed": None if body.seed is None else (body.seed + i) % SEEDS,
        "repetition_penalty": body.repetition_penalty
        if body.repetition_penalty is not None
        else 1.0,
        "presence_penalty": body.presence_penalty or 0.0,
        "frequency_penalty": body.frequency_penalty or 0.0,
        "logit_bias": body.logit_bias or {},
    }
    return given | {
        "max_tokens": body.most or context - prompt,
        "min_tokens": body.min_tokens or 0,
        "stop": body.stops,
        "stop_ids": frozenset(body.stop_token_ids or ()),
        "ignore_eos": bool(body.ignore_eos),
        "include_stop": bool(body.include_stop_str_in_output),
        "logprobs": body.top,
        "user": body.user or "",
    }


async def scores(
    front: LocalBackend, body: ChatRequest | CompletionRequest, prompts: list[list[int]]
) -> "list[list[TokenLogprob] | None]":
    """The prompts' own log-probabilities, where they are echoed with them."""
    if not isinstance(body, CompletionRequest) or not body.echo or body.top is None:
        return [None] * len(prompts)
    from peagle.server.openai.prompt_logprobs import score

    target, top = front.engines.require_ready().target, body.top
    found: list[list[TokenLogprob] | None] = []
    for ids in prompts:
        found.append(
            await asyncio.wrap_future(front.engines.driver.submit_slow(score(target, ids, top)))
        )
    return found


def check_ids(ids: list[int], vocabulary: int) -> None:
    if max(ids) >= vocabulary:
        bad = [token for token in ids if token >= vocabulary][:5]
        raise ApiError(400, f"token ids {bad} are outside the vocabulary of {vocabulary}", "prompt")
