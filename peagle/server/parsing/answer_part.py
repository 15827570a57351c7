"""AnswerPart: what a piece of an answer's text means: content, reasoning, or a tool call."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The beginning of a tool call; calls of an answer are numbered from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


AnswerPart = Content | Reasoning | ToolCallStart | ToolCallArguments
