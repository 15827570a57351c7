"""An agent of the openai-agents package, which calls three tools and answers.

The import of the package takes two seconds, so tests import this module inside functions.
"""

from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIResponsesModel,
    RunConfig,
    RunHooks,
    Runner,
    function_tool,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

CALLS = 3


class Answer(BaseModel):
    verdict: Literal["good", "bad"]


class LastTurn(RunHooks[Any]):
    """After three calls, the agent must answer in a format that a random target completes."""

    def __init__(self, agent: Agent[Any]) -> None:
        self.agent = agent
        self.results: list[str] = []

    async def on_tool_end(self, context: Any, agent: Any, tool: Any, result: str) -> None:
        self.results.append(result)
        if len(self.results) == CALLS:
            self.agent.model_settings.tool_choice = "none"
            self.agent.output_type = Answer


@function_tool
def clock(zone: Literal["utc", "cet"]) -> str:
    """The time in a zone."""
    return f"noon in {zone}"


@function_tool
def weather(city: Literal["Rome", "Oslo"]) -> str:
    """The weather in a city."""
    return f"sun in {city}"


async def run_agent(url: str, streams: bool) -> None:
    """Let the agent work on a server whose target calls tools."""
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
    settings = ModelSettings(
        temperature=0, max_tokens=200, tool_choice="required", parallel_tool_calls=False
    )
    agent = Agent(
        name="assistant",
        instructions="Use the tools.",
        model=OpenAIResponsesModel("tiny", client),
        model_settings=settings,
        tools=[clock, weather],
        reset_tool_choice=False,  # Otherwise only the first call is required.
    )
    hooks = LastTurn(agent)
    config = RunConfig(tracing_disabled=True)
    if streams:
        result: Any = Runner.run_streamed(agent, "Hello!", hooks=hooks, run_config=config)
        types = [event.type async for event in result.stream_events()]
        assert "raw_response_event" in types
    else:
        result = await Runner.run(agent, "Hello!", hooks=hooks, run_config=config)
    kinds = [item.type for item in result.new_items]
    assert kinds == ["tool_call_item", "tool_call_output_item"] * CALLS + ["message_output_item"]
    assert len(hooks.results) == CALLS
    assert all(text.startswith(("noon in ", "sun in ")) for text in hooks.results)
    assert isinstance(result.final_output, Answer)
    usage = result.context_wrapper.usage
    assert usage.requests == CALLS + 1 and usage.input_tokens_details.cached_tokens > 0
