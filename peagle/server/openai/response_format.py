"""The grammar of an answer, from OpenAI's response_format or vLLM's fields for the same."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from peagle.engine.thinking import Thinking
from peagle.errors import UserError
from peagle.grammar import Grammar
from peagle.grammar.matcher import JSON_WHITESPACE
from peagle.server.front.engine_backend import EngineBackend
from peagle.server.http.errors import ApiError
from peagle.server.http.schema import (
    MAX_NAME_CHARS,
    GenerationRequest,
    ResponseFormat,
    StructuredOutputs,
)
from peagle.server.messages import ProbedGrammar

ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True)
class GrammarField:
    """A field of the request that may constrain the answer; value None: it does not."""

    name: str
    parse: Callable[[Any], Grammar]
    value: Any


@dataclass(frozen=True, slots=True)
class AnswerRules:
    """What the target's format and the tools of a chat request ask of its answer."""

    tool_grammar: Grammar | None = None  # None: calls are not bound.
    # What a call must follow if the answer is one, where response_format binds other answers.
    optional_call_grammar: Grammar | None = None
    thinking: Thinking | None = None
    shows_special_tokens: bool = False

    def thinking_for(self, grammar: ProbedGrammar | None) -> Thinking | None:
        """What the engine must know of the thinking part: nothing, if nothing depends on it."""
        if self.thinking is None or grammar is None:
            has_budget = self.thinking is not None and self.thinking.budget is not None
            return self.thinking if has_budget else None
        # Behind the first end stands the text of the answer, which the grammar binds.
        return replace(self.thinking, ends=self.thinking.ends[:1])


async def compile_grammar(
    backend: EngineBackend, body: GenerationRequest, rules: AnswerRules
) -> ProbedGrammar | None:
    """The grammar that the answer must follow, compiled in GrammarQueue."""
    fields = [field for field in grammar_fields(body, rules) if field.value is not None]
    if not fields:
        return None
    field = fields[0]
    if len(fields) > 1:
        second = fields[1].name
        raise ApiError(
            400, f"{field.name} and {second} both constrain the answer: give one of them", second
        )
    compiler = backend.engines.require_loaded().grammars
    queue = backend.engines.grammar_queue
    try:
        grammar = await queue.run(lambda: parse_field(field))
        return await queue.compile(compiler, grammar, body.user or "")
    except UserError as error:
        raise ApiError(400, f"{field.name}: {error}", field.name) from error
    except ApiError as error:
        error.param = error.param or field.name
        raise


def parse_field(field: GrammarField) -> Grammar:
    grammar = field.parse(field.value)
    grammar.check()
    return grammar


def grammar_fields(body: GenerationRequest, rules: AnswerRules) -> list[GrammarField]:
    outputs = body.structured_outputs or StructuredOutputs.model_validate({})
    for name, value in (outputs.model_extra or {}).items():
        if value:
            field = f"structured_outputs.{name[:MAX_NAME_CHARS]}"
            raise ApiError(
                400,
                f"{field} is not supported: use json, json_object, regex, choice or grammar",
                field,
            )
    json_object = ANY_OBJECT if outputs.json_object else None
    text_schema = json_schema(body.response_format)
    if rules.tool_grammar is not None:
        text_schema = None  # It binds the text of an answer, and forced calls leave none.

    def response_format(schema: dict[str, Any] | bool) -> Grammar:
        calls = rules.optional_call_grammar
        return Grammar.json(schema) if calls is None else calls_or_json(calls, schema)

    return [
        GrammarField("tools", lambda grammar: grammar, rules.tool_grammar),
        GrammarField("response_format", response_format, text_schema),
        GrammarField("guided_json", Grammar.json, body.guided_json),
        GrammarField("guided_regex", Grammar.regex, body.guided_regex),
        GrammarField("guided_choice", Grammar.choice, body.guided_choice),
        GrammarField("guided_grammar", Grammar.ebnf, body.guided_grammar),
        GrammarField("structured_outputs.json", Grammar.json, outputs.schema_),
        GrammarField("structured_outputs.json_object", Grammar.json, json_object),
        GrammarField("structured_outputs.regex", Grammar.regex, outputs.regex),
        GrammarField("structured_outputs.choice", Grammar.choice, outputs.choice),
        GrammarField("structured_outputs.grammar", Grammar.ebnf, outputs.grammar),
    ]


def calls_or_json(calls: Grammar, schema: dict[str, Any] | bool) -> Grammar:
    """Answers that are calls, by a grammar in Lark's notation, or that follow a JSON schema."""
    Grammar.json(schema).check()
    schema = {} if isinstance(schema, bool) else schema
    bounded = {"x-guidance": {"whitespace_pattern": JSON_WHITESPACE}} | schema
    answer = json.dumps(bounded, ensure_ascii=False)
    rules = re.sub(r"^start:", "calls:", calls.text, flags=re.MULTILINE)
    return Grammar("lark", f"start: calls | json_answer\njson_answer: %json {answer}\n{rules}")


def json_schema(response_format: ResponseFormat | None) -> dict[str, Any] | bool | None:
    """The schema that a response_format asks for; None: plain text."""
    if response_format is None or response_format.type == "text":
        return None
    if response_format.type == "json_object":
        return ANY_OBJECT
    if response_format.json_schema is None:
        raise ApiError(
            400,
            "response_format.json_schema is missing: give its name and schema",
            "response_format",
        )
    return response_format.json_schema.schema_
