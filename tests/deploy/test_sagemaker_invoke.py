"""Streamed answers through the real botocore, from a server with SageMaker's event stream; logs."""

import json
import time
from typing import Any

import boto3
import pytest
from botocore.config import Config
from typer.testing import CliRunner

from peagle.cli import app
from peagle.deploy.response import join_lines, parse_events
from peagle.deploy.sagemaker.operate.clients import Clients
from peagle.deploy.sagemaker.operate.invoke import (
    invoke,
    invoke_stream,
    response_text,
)
from peagle.deploy.sagemaker.operate.logs import log_events
from peagle.errors import UserError
from tests.support.deploy.aws import NAME, REGION, aws
from tests.support.deploy.sagemaker_runtime import Runtime, broken, part, runtime

__all__ = ["aws", "runtime"]
WORDS = ["Grüße", " an", " die", " Welt", " 🌍"]
SSE = "".join(
    f"data: {json.dumps({'choices': [{'delta': {'content': word}}]}, ensure_ascii=False)}\n\n"
    for word in WORDS
)
WHOLE = SSE.encode() + b"data: [DONE]\n\n"


@pytest.fixture
def client(runtime: Runtime) -> Any:
    return boto3.client(
        "sagemaker-runtime", region_name=REGION, config=Config(retries={"total_max_attempts": 1})
    )


@pytest.mark.parametrize("size", [1, 3, 7, 50, 10_000])
def test_parts_that_do_not_align_with_lines(size: int, runtime: Runtime, client: Any) -> None:
    runtime.frames = [part(WHOLE[i : i + size]) for i in range(0, len(WHOLE), size)]
    assert [response_text(chunk) for chunk in invoke_stream(client, NAME, {"prompt": "x"})] == WORDS
    assert runtime.asked == [
        (f"/endpoints/{NAME}/invocations-response-stream", {"prompt": "x", "stream": True})
    ]


def test_an_exception_in_mid_stream(runtime: Runtime, client: Any) -> None:
    runtime.frames = [part(WHOLE[:60]), part(WHOLE[60:130]), broken("the model took too long")]
    heard = []
    with pytest.raises(UserError, match=r"broke off: .*the model took too long"):
        for chunk in invoke_stream(client, NAME, {"prompt": "x"}):
            heard.append(response_text(chunk))
    assert heard == WORDS[: len(heard)] and heard


def test_an_error_of_the_container_in_mid_stream(runtime: Runtime, client: Any) -> None:
    runtime.frames = [
        part(SSE.encode()),
        part(b'data: {"error": {"message": "out of pages"}}\n\ndata: [DONE]\n\n'),
    ]
    with pytest.raises(UserError, match="the endpoint reports: out of pages"):
        list(invoke_stream(client, NAME, {"prompt": "x"}))


def test_a_stream_without_an_end_is_an_error(runtime: Runtime, client: Any) -> None:
    runtime.frames = [part(SSE.encode())]
    with pytest.raises(UserError, match="before its"):
        list(invoke_stream(client, NAME, {"prompt": "x"}))


def test_errors_of_the_container_are_reported(runtime: Runtime, client: Any) -> None:
    runtime.status = 424
    runtime.body = json.dumps(
        {"OriginalStatusCode": 400, "OriginalMessage": "too long", "Message": "m"}
    ).encode()
    for ask in (lambda: list(invoke_stream(client, NAME, {})), lambda: invoke(client, NAME, {})):
        with pytest.raises(UserError, match="answered 400: too long"):
            ask()


def test_a_whole_answer(runtime: Runtime, client: Any) -> None:
    runtime.body = json.dumps({"choices": [{"message": {"content": "Hallo"}}]}).encode()
    assert response_text(invoke(client, NAME, {"prompt": "x"})) == "Hallo"
    runtime.body = b"<html>"
    with pytest.raises(UserError, match="is not JSON"):
        invoke(client, NAME, {})


def test_lines_and_events_are_parsed() -> None:
    assert list(join_lines([b"a\n\nb", b"c\nd"])) == [b"a", b"", b"bc", b"d"]
    assert list(
        parse_events([b": hello", b"event: x", b'data:{"a": 1}\r', b"data: [DONE]", b"data: no"])
    ) == [{"a": 1}]
    assert (
        response_text({"choices": [{"text": "t"}]}) == "t"
        and response_text({"choices": [], "usage": {}}) == ""
    )


def test_the_invoke_command(runtime: Runtime) -> None:
    runtime.frames = [part(WHOLE[i : i + 11]) for i in range(0, len(WHOLE), 11)]
    result = CliRunner().invoke(
        app, ["sagemaker", "invoke", NAME, "Hello", "--region", REGION, "--max-tokens", "9"]
    )
    assert result.exit_code == 0 and result.stdout == "".join(WORDS) + "\n"
    ((_, asked),) = runtime.asked
    assert asked["messages"] == [{"role": "user", "content": "Hello"}] and asked["max_tokens"] == 9
    runtime.frames = [part(WHOLE[:60]), broken("gone")]
    result = CliRunner().invoke(app, ["sagemaker", "invoke", NAME, "Hello", "--region", REGION])
    assert result.exit_code == 2 and "gone" in result.stderr
    result = CliRunner().invoke(app, ["sagemaker", "invoke", NAME, "--region", REGION])
    assert result.exit_code == 2 and "--body" in result.stderr


def test_log_events_are_read(aws: Clients) -> None:
    client = aws["logs"]
    group = f"/aws/sagemaker/Endpoints/{NAME}"
    with pytest.raises(UserError, match=f"no log group {group}"):
        list(log_events(client, NAME, 0))
    client.create_log_group(logGroupName=group)
    for instance in ("i-1", "i-2"):
        client.create_log_stream(logGroupName=group, logStreamName=instance)
    now = int(time.time() * 1000)

    def write(instance: str, *lines: tuple[int, str]) -> None:
        records = [{"timestamp": now + after, "message": text} for after, text in lines]
        client.put_log_events(logGroupName=group, logStreamName=instance, logEvents=records)

    write("i-1", (-90_000, "old"), (1, "a"), (3, "c"))
    write("i-2", (2, "b"))
    assert [event["message"] for event in log_events(client, NAME, now)] == ["a", "b", "c"]
    following = log_events(
        client, NAME, now, follow=True, sleep=lambda seconds: write("i-2", (4, "d"))
    )
    assert [next(following)["message"] for _ in range(4)] == ["a", "b", "c", "d"]
