"""The format of an answer: OpenAI's response_format and vLLM's spellings of the same, as one grammar."""

import asyncio
from collections.abc import Callable
from typing import Any

from peagle.errors import UserError
from peagle.grammar import Grammar
from peagle.server.engines.local_backend import LocalBackend
from peagle.server.http.errors import ApiError
from peagle.server.http.schema import GenerationRequest, ResponseFormat, StructuredOutputs

SECONDS = 20.0  # for a grammar; the first one waits for the vocabulary to be read
OBJECT = {"type": "object"}

Wanted = tuple[
    str, Callable[[Any], Grammar], Any
]  # the field, what makes a grammar of it, its value


async def compiled(front: LocalBackend, body: GenerationRequest) -> Grammar | None:
    """What the answer is bound to; compiled on a thread of its own, and then known to every engine."""
    found = [wanted for wanted in all_wanted(body) if wanted[2] is not None]
    if not found:
        return None
    if len(found) > 1:
        raise ApiError(
            400,
            f"{found[0][0]} and {found[1][0]} both bind the answer: give one of them",
            found[1][0],
        )
    field, make, value = found[0]
    grammars = front.engines.require_ready().grammars

    def work() -> Grammar:
        grammar = make(value)
        grammars.matcher(grammar)
        return grammar

    try:
        async with asyncio.timeout(SECONDS):
            return await asyncio.to_thread(work)
    except UserError as error:
        raise ApiError(400, f"{field}: {error}", field) from error
    except TimeoutError as error:
        reason = f"the grammar was not compiled within {SECONDS:g} seconds: make it smaller"
        raise ApiError(400, f"{field}: {reason}", field) from error


def all_wanted(body: GenerationRequest) -> list[Wanted]:
    more = body.structured_outputs or StructuredOutputs.model_validate({})
    if unknown := [name for name, value in (more.model_extra or {}).items() if value]:
        field = f"structured_outputs.{unknown[0]}"
        raise ApiError(
            400,
            f"{field} cannot be honored: use json, json_object, regex, choice or grammar",
            field,
        )
    return [
        ("response_format", Grammar.json, schema_of(body.response_format)),
        ("guided_json", Grammar.json, body.guided_json),
        ("guided_regex", Grammar.regex, body.guided_regex),
        ("guided_choice", Grammar.choice, body.guided_choice),
        ("guided_grammar", Grammar.ebnf, body.guided_grammar),
        ("structured_outputs.json", Grammar.json, more.schema_),
        ("structured_outputs.json_object", Grammar.json, OBJECT if more.json_object else None),
        ("structured_outputs.regex", Grammar.regex, more.regex),
        ("structured_outputs.choice", Grammar.choice, more.choice),
        ("structured_outputs.grammar", Grammar.ebnf, more.grammar),
    ]


def schema_of(asked: ResponseFormat | None) -> dict[str, Any] | bool | None:
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return OBJECT
    if asked.json_schema is None:
        raise ApiError(
            400,
            "response_format.json_schema is missing: give its name and schema",
            "response_format",
        )
    return asked.json_schema.asked
