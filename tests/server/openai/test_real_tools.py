"""Tool calls of the default pair: grammars make them valid, with and without drafts.

SmolLM2's template does not support tools, so they are described in the system message.
"""

import json
from typing import Any

import jsonschema
import pytest

from benchmarks.server.tool_calls import SCHEMAS, TOOLS
from peagle import load
from peagle.catalog import DEFAULT_PAIR
from tests.support.api import clients
from tests.support.server.serving import make_backend, running

QUESTION: Any = [{"role": "user", "content": "What is the weather in Lima, in celsius?"}]
NAMED = {"type": "function", "function": {"name": "create_event"}}


def call_of(client: Any, method: str, tool_choice: Any) -> tuple[str, str]:
    """The name and the arguments of the one call of a streamed answer."""
    stream = client.chat.completions.create(
        model=DEFAULT_PAIR,
        messages=QUESTION,
        tools=TOOLS,  # type: ignore[arg-type]
        tool_choice=tool_choice,
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=96,
        stream=True,
        extra_body={"peagle": {"method": method}},
    )
    deltas = [call for chunk in stream for call in chunk.choices[0].delta.tool_calls or ()]
    name = "".join(delta.function.name or "" for delta in deltas if delta.function)
    return name, "".join(delta.function.arguments or "" for delta in deltas if delta.function)


@pytest.mark.parametrize(
    ("tool_choice", "chosen"),
    [
        pytest.param(NAMED, {"create_event"}, id="named", marks=pytest.mark.slow),
        # This answer also chooses the tool, so it is longer; test_tools.py uses a tiny target.
        pytest.param("required", {*SCHEMAS}, id="required", marks=pytest.mark.slow),
    ],
)
def test_forced_calls_follow_their_schema(tool_choice: Any, chosen: set[str]) -> None:
    backend = make_backend(load, pair=DEFAULT_PAIR, k="auto", kv_tokens=8192, exact=False)
    with running(backend) as (_, url):
        client = clients.openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        name, arguments = call_of(client, "p-eagle", tool_choice)
        assert call_of(client, "none", tool_choice) == (name, arguments)
    jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    assert name in chosen
