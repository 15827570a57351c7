"""ChatTools: the tools of a chat request, which calls its answer may make, and their grammar."""

from dataclasses import dataclass, replace

from peagle.errors import UserError
from peagle.grammar import Grammar
from peagle.server.front.engine_backend import EngineBackend
from peagle.server.http.errors import ApiError
from peagle.server.http.schema import ChatRequest, NamedToolChoice
from peagle.server.openai.answer_format import AnswerFormat
from peagle.server.openai.response_format import AnswerRules, json_schema
from peagle.server.parsing.tool import Tool, ToolChoice


@dataclass(frozen=True, slots=True)
class ChatTools:
    tools: list[Tool]
    choice: ToolChoice
    grammar: Grammar | None = None  # What binds the calls; None: the target writes freely.
    # What calls must follow if there are any, where response_format binds all other answers.
    optional_grammar: Grammar | None = None


async def chat_tools(backend: EngineBackend, body: ChatRequest, form: AnswerFormat) -> ChatTools:
    tools = [
        Tool(function.name, function.description or "", function.parameters, bool(function.strict))
        for function in (tool.require_function() for tool in body.shown_tools)
    ]
    choice = tool_choice(body)
    if not tools:
        return ChatTools(tools, choice)

    is_optional = choice.kind == "auto" and json_schema(body.response_format) is not None
    bound = replace(choice, kind="required") if is_optional else choice
    try:
        grammar = await backend.engines.grammar_queue.run(
            lambda: form.tools.grammar(tools, bound, form.added_tokens)
        )
    except UserError as error:
        raise ApiError(400, f"tools: {error}", "tools") from error
    if is_optional:
        return ChatTools(tools, choice, optional_grammar=grammar)
    return ChatTools(tools, choice, grammar)


def answer_rules(
    body: ChatRequest, form: AnswerFormat, tools: ChatTools, prompt_ending: str
) -> AnswerRules:
    thinking = form.thinking(prompt_ending, body.thinking_budget)
    if form.is_harmony and (tools.grammar is not None or tools.optional_grammar is not None):
        check_harmony(body, tools)
        thinking = None  # The grammar of the calls includes the reasoning before them.
    return AnswerRules(
        tools.grammar,
        tools.optional_grammar,
        thinking,
        form.shows_special_tokens(bool(tools.tools)),
    )


def check_harmony(body: ChatRequest, tools: ChatTools) -> None:
    """Refuse what cannot be combined with calls that a grammar binds."""
    if body.thinking_budget is not None:
        raise ApiError(
            400,
            "max_thinking_tokens does not work with required or strict tools of this target:"
            " leave one of them out",
            "max_thinking_tokens",
        )
    if tools.optional_grammar is not None:
        raise ApiError(
            400,
            "response_format does not work with tools of this target: use tool_choice none",
            "response_format",
        )


def tool_choice(body: ChatRequest) -> ToolChoice:
    parallel = body.parallel_tool_calls is not False
    choice = body.tool_choice
    if isinstance(choice, NamedToolChoice):
        return ToolChoice("function", choice.function.name, parallel)
    if not body.tools:
        return ToolChoice("none")
    return ToolChoice(choice or "auto", parallel=parallel)
