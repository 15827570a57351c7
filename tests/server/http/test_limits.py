"""Bodies with many invalid items, many values or much memory are refused early."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from peagle.server.front.engine_backend import EngineBackend
from peagle.server.http import limits
from peagle.server.http.errors import MAX_FIELD_CHARS, ApiError, from_validation
from peagle.server.http.limits import BodyBudget, parse_object
from peagle.server.http.schema import (
    MAX_LOGIT_BIAS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    RequestModel,
    TokenizeRequest,
)
from tests.support.server.serving import CHAT, HELLO, TEXT, ask, served

MANY = 100_000
FEW_ERRORS = 300
GOOD_PART = {"type": "text", "text": "a"}
WRONG_LISTS: list[tuple[type[RequestModel], dict[str, Any]]] = [
    (CompletionRequest, {"prompt": [{}] * MANY}),
    (CompletionRequest, {"prompt": [[{}] * MANY]}),
    (CompletionRequest, {"prompt": ["a"] * 1000 + [{}] * MANY}),
    (CompletionRequest, {"prompt": "a", "stop": [1] * MANY}),
    (CompletionRequest, {"prompt": "a", "stop_token_ids": ["a"] * MANY}),
    (CompletionRequest, {"prompt": "a", "guided_choice": [1] * MANY}),
    (CompletionRequest, {"prompt": "a", "structured_outputs": {"choice": [1] * MANY}}),
    (CompletionRequest, {"prompt": "a", "logit_bias": {f"a{i}": "b" for i in range(MANY // 2)}}),
    (ChatRequest, {"messages": [1] * MANY}),
    (ChatRequest, {"messages": [{"role": "user", "content": [1] * MANY}]}),
    (ChatRequest, {"messages": [{"role": "user", "content": [GOOD_PART] * 9 + [1]}] * 4096}),
    (TokenizeRequest, {"messages": [1] * MANY}),
    (DetokenizeRequest, {"tokens": ["a"] * MANY}),
]


@pytest.mark.parametrize(("model", "body"), WRONG_LISTS)
def test_validation_stops_at_the_first_invalid_item(
    model: type[RequestModel], body: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    assert caught.value.error_count() < FEW_ERRORS


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (
            CompletionRequest,
            {"prompt": "a", "logit_bias": dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1)},
        ),
        (CompletionRequest, {"prompt": "a", "guided_choice": ["a"] * MANY}),
        (CompletionRequest, {"prompt": ["a"] * MANY}),
        (ChatRequest, {"messages": HELLO * MANY}),
        (ChatRequest, {"messages": [{"role": "user", "content": [GOOD_PART] * MANY}]}),
        (DetokenizeRequest, {"tokens": [1] * (1 << 21)}),
    ],
)
def test_lists_have_a_maximum(model: type[RequestModel], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="at most"):
        model.model_validate(body)


def test_a_large_logit_bias_is_accepted() -> None:
    bias = {str(token): -100 for token in range(30_000)}
    request = CompletionRequest.model_validate({"prompt": "a", "logit_bias": bias})
    assert request.logit_bias == dict.fromkeys(range(30000), -100.0)


def test_field_names_in_errors_are_shortened() -> None:
    name = "a" * MANY
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate({"prompt": "a", "logit_bias": {name: 1}})
    error = from_validation(caught.value)
    assert error.param is not None and error.param.startswith("logit_bias.a")
    assert len(error.param) <= MAX_FIELD_CHARS and len(error.message) < 2 * MAX_FIELD_CHARS


@pytest.mark.parametrize("item", [b"[]", b"{}", b"1", b'{"a":1}', b'""'])
def test_a_body_has_a_maximum_of_values(item: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_JSON_VALUES", 1000)
    assert parse_object(b'{"a":[' + b",".join([item] * 300) + b"]}")
    with pytest.raises(ApiError) as refused:
        parse_object(b'{"a":[' + b",".join([item] * 1100) + b"]}")
    assert refused.value.status == 413


def test_the_memory_of_bodies_has_a_limit() -> None:
    free = limits.THREAD_PARSE_BYTES
    budget = BodyBudget(100)
    budget.grow(0, free + 60)
    with pytest.raises(ApiError) as refused:
        budget.grow(free, free + 60)
    assert refused.value.status == 503 and refused.value.retry_after
    budget.grow(0, free)  # Small bodies pass while large ones fill the budget.
    budget.release(free)
    budget.release(free + 60)
    budget.grow(free, free + 100)


def test_bodies_return_their_memory() -> None:
    """After many large and some refused bodies, there is memory for further bodies."""

    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        padding = "x" * (1 << 20)
        for _ in range(6):
            await ask(client, TEXT, padding=padding)
            await ask(client, TEXT, code=400, padding=padding, temperature=-1)
            response = await client.post(TEXT, content=b"{" + padding.encode())
            assert response.status_code == 400
        await asyncio.gather(*(ask(client, padding=padding) for _ in range(4)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("peagle.server.http.app.MIN_BODY_BUDGET", 5 << 20)
        patch.setattr("peagle.server.http.app.MAX_LARGE_BODIES", 1)
        served(test, max_body_mb=2)


def test_large_invalid_bodies_get_one_error() -> None:
    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        for path, body in ((TEXT, {"prompt": [{}] * MANY}), (CHAT, {"messages": [1] * MANY})):
            content = json.dumps(body)
            assert len(content) > limits.THREAD_PARSE_BYTES
            response = await client.post(path, content=content)
            assert response.status_code == 400 and len(response.content) < 500

    served(test)
