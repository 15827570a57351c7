"""One exchange of an OpenAI-compatible server, read from a line of its log.

    {"request": {...}, "response": {...}}                         bodies of a request and its answer
    {"body": {...}, "response": {"body": {...}}}                  a batch file with both
    {"custom_id": "1", "body": {...}}                             a line of a batch's input file
    {"custom_id": "1", "response": {"body": {...}}}               a line of a batch's output file

Bodies are those of chat completions or completions. Token ids in them (`prompt_token_ids`,
`token_ids`, as vLLM returns them) are used as they are; text is encoded by the target's tokenizer.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

from peagle.data.chat import encode_prompt
from peagle.target import Target


@dataclass(frozen=True, slots=True)
class Exchange:
    request: dict[str, Any]
    response: dict[str, Any]


class BatchLines:
    """Joins the lines of a batch's input and output files by their custom_id."""

    def __init__(self) -> None:
        self.requests: dict[str, dict[str, Any]] = {}
        self.responses: dict[str, dict[str, Any]] = {}

    def exchange(self, record: dict[str, Any]) -> Exchange | None:
        """The exchange that a record completes; None: its other half is still missing."""
        request = record.get("request", record.get("body"))
        response = record.get("response")
        if isinstance(response, dict) and "body" in response:
            if response.get("status_code", 200) != 200:
                raise ValueError(f"the response has status {response['status_code']}")
            response = response["body"]
        if isinstance(request, dict) and isinstance(request.get("body"), dict):
            request = request["body"]
        if isinstance(request, dict) and isinstance(response, dict):
            return Exchange(request, response)
        return self._join(record.get("custom_id"), request, response)

    def _join(self, key: Any, request: Any, response: Any) -> Exchange | None:
        if not isinstance(key, str) or not isinstance(request or response, dict):
            raise ValueError("a record has `request` and `response`, or `body` and a `custom_id`")
        if isinstance(request, dict):
            self.requests[key] = request
        else:
            self.responses[key] = response
        if key not in self.requests or key not in self.responses:
            return None
        return Exchange(self.requests.pop(key), self.responses.pop(key))


def encode_exchange(target: Target, exchange: Exchange) -> Iterator[tuple[list[int], list[int]]]:
    """The prompt and answer ids of each choice; ValueError: the exchange cannot be used."""
    request, response = exchange.request, exchange.response
    if request.get("tools") or request.get("functions"):
        raise ValueError("requests with tools are not supported: their prompt is not known")
    choices = response.get("choices")
    if not isinstance(choices, list) or not choices:
        raise ValueError("the response has no `choices`: log whole answers, not streamed chunks")
    prompt = encode_request(target, request, response)
    for choice in choices:
        answer = encode_answer(target, choice)
        if answer:
            yield prompt, answer


def encode_request(target: Target, request: dict[str, Any], response: dict[str, Any]) -> list[int]:
    if is_ids(ids := response.get("prompt_token_ids")):
        return checked_ids(target, ids)
    if isinstance(messages := request.get("messages"), list):
        return encode_prompt(target, [flatten_message(message) for message in messages])
    prompt = request.get("prompt")
    if is_ids(prompt):
        return checked_ids(target, prompt)
    if not isinstance(prompt, str):
        raise ValueError("a request has `messages`, or a `prompt` of text or token ids")
    return tokenizer_of(target)(prompt)["input_ids"]


def flatten_message(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is text; parts of other kinds are not supported."""
    content = message.get("content")
    if isinstance(content, list):
        if any(part.get("type") != "text" for part in content):
            raise ValueError("a message has content that is not text")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise ValueError("a message has no text")
    return {**message, "content": content}


def encode_answer(target: Target, choice: dict[str, Any]) -> list[int]:
    """The ids of an answer, with the stop token that the target wrote, if it stopped itself."""
    if is_ids(ids := choice.get("token_ids")):
        return checked_ids(target, ids)
    message = choice.get("message")
    text = message.get("content") if isinstance(message, dict) else choice.get("text")
    if not isinstance(text, str):
        raise ValueError("a choice has no text")
    answer = tokenizer_of(target)(text, add_special_tokens=False)["input_ids"]
    stops = choice.get("finish_reason") == "stop" and choice.get("stop_reason") is None
    end = stop_token(target) if stops else None
    return answer if end is None or not answer else [*answer, end]


def stop_token(target: Target) -> int | None:
    """The token that ends the target's answers."""
    end = getattr(target.tokenizer, "eos_token_id", None)
    return end if end in target.stop_ids else next(iter(target.stop_ids), None)


def tokenizer_of(target: Target) -> Any:
    if target.tokenizer is None:
        raise ValueError("the target has no tokenizer: log token ids")
    return target.tokenizer


def is_ids(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def checked_ids(target: Target, ids: list[int]) -> list[int]:
    if min(ids) < 0 or max(ids) >= target.vocab_size:
        raise ValueError(f"token ids outside the target's vocabulary of {target.vocab_size}")
    return ids
