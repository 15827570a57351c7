"""ParsedMessage: the message that the parts of an answer make."""

from dataclasses import dataclass, field

from peagle.server.parsing.answer_part import AnswerPart, Content, Reasoning, ToolCallStart


@dataclass(slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str = ""  # JSON text


@dataclass(slots=True)
class ParsedMessage:
    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    def add(self, part: AnswerPart) -> None:
        if isinstance(part, Content):
            self.content += part.text
        elif isinstance(part, Reasoning):
            self.reasoning += part.text
        elif isinstance(part, ToolCallStart):
            assert part.index == len(self.tool_calls)
            self.tool_calls.append(ToolCall(part.id, part.name))
        else:
            self.tool_calls[part.index].arguments += part.text
