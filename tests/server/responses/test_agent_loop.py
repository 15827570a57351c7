"""An agent of the openai-agents package calls three tools and answers, over /v1/responses."""

import asyncio

import pytest

from tests.support.api.tool_pair import tool_pair
from tests.support.server.serving import make_backend, running


@pytest.mark.parametrize("streams", [False, True])
def test_three_tool_calls_and_an_answer(streams: bool) -> None:
    from tests.support.api.tool_agent import run_agent

    with running(make_backend(tool_pair, kv_tokens=16384)) as (_, url):
        asyncio.run(run_agent(url, streams))
