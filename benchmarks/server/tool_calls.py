"""Tool calls of a live server, with and without drafts: python -m benchmarks.server.tool_calls URL

Sends 50 requests with three tools and `tool_choice` auto, greedy, once for each method, and counts
the answers that call a tool with arguments that follow its schema. Greedy answers in float32 are
the same with every method:

    peagle serve qwen2.5-coder-0.5b --dtype float32 --method none --port 8000
    python -m benchmarks.server.tool_calls http://127.0.0.1:8000 --methods none,ngram
"""

import argparse
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import jsonschema

CITIES = ("Paris", "Lagos", "Lima", "Oslo", "Hanoi", "Quito", "Cairo", "Perth", "Kyoto", "Austin")
PATTERNS = ("TODO", "parse_config", "timeout", "class Server", "import numpy")
EVENTS = ("dentist", "team lunch", "release review", "piano lesson", "budget meeting")
DAYS = ("2026-12-01", "2026-12-05", "2027-01-11", "2027-02-20", "2027-03-03")


def function_tool(name: str, description: str, **properties: dict[str, Any]) -> dict[str, Any]:
    """A tool all of whose arguments are required."""
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


TEXT = {"type": "string"}
TOOLS = [
    function_tool(
        "get_weather",
        "Current weather of a city.",
        city=TEXT,
        unit={"type": "string", "enum": ["celsius", "fahrenheit"]},
    ),
    function_tool(
        "search_files",
        "Search the files of the project for a text.",
        query=TEXT,
        max_results={"type": "integer", "minimum": 1},
    ),
    function_tool(
        "create_event",
        "Add an event to the calendar.",
        title=TEXT,
        date={"type": "string", "description": "YYYY-MM-DD"},
        minutes={"type": "integer", "minimum": 5},
    ),
]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}


def prompts() -> Iterator[str]:
    """20 requests for the weather, 15 searches and 15 events."""
    for city in CITIES:
        yield f"What is the weather in {city}, in celsius?"
        yield f"I travel to {city} today. Give me its temperature in fahrenheit."
    for pattern in PATTERNS:
        for count in (3, 10, 25):
            yield f"Search the project for '{pattern}' and show at most {count} results."
    for title, day in zip(EVENTS, DAYS, strict=True):
        for minutes in (15, 45, 90):
            yield f"Put '{title}' into my calendar on {day} for {minutes} minutes."


@dataclass(slots=True)
class MethodResult:
    answers: list[dict[str, Any]] = field(default_factory=list)  # Messages, in order.
    accepted: int = 0
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def valid_calls(self) -> int:
        return sum(map(is_valid_call, self.answers))

    @property
    def acceptance_length(self) -> float:
        return 1 + self.accepted / self.steps if self.steps else 1.0


def is_valid_call(message: dict[str, Any]) -> bool:
    """Whether the message calls a tool, and every call follows the tool's schema."""
    calls = message.get("tool_calls") or []
    return bool(calls) and all(map(follows_schema, calls))


def follows_schema(call: dict[str, Any]) -> bool:
    function = call["function"]
    try:
        jsonschema.validate(json.loads(function["arguments"]), SCHEMAS[function["name"]])
    except (KeyError, ValueError, jsonschema.ValidationError):
        return False
    return True


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """The message without the random ids of its calls."""
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return message | {"tool_calls": calls}


def run_method(url: str, method: str, limit: int, concurrency: int) -> MethodResult:
    result = MethodResult()
    started = time.monotonic()
    with httpx.Client(base_url=url, timeout=600) as client, ThreadPoolExecutor(concurrency) as pool:

        def ask(prompt: str) -> dict[str, Any]:
            body = {
                "messages": [{"role": "user", "content": prompt}],
                "tools": TOOLS,
                "temperature": 0,
                "max_tokens": 128,
                "peagle": {"method": method},
            }
            response = client.post("/v1/chat/completions", json=body)
            response.raise_for_status()
            return dict(response.json())

        for reply in pool.map(ask, list(prompts())[:limit]):
            drafts = reply["metrics"]["speculative_decoding"]
            result.answers.append(reply["choices"][0]["message"])
            result.accepted += drafts["num_accepted_draft_tokens"]
            result.steps += drafts["num_spec_steps"]
            result.tokens += reply["usage"]["completion_tokens"]
    result.seconds = time.monotonic() - started
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("url")
    parser.add_argument("--methods", default="none,ngram")
    parser.add_argument("--limit", type=int, default=50)
    parser.add_argument("--concurrency", type=int, default=4)
    options = parser.parse_args()
    methods = options.methods.split(",")
    results = {
        method: run_method(options.url, method, options.limit, options.concurrency)
        for method in methods
    }
    first = [without_ids(message) for message in results[methods[0]].answers]
    print("method     valid calls  identical  acceptance length  tokens/s")
    for method, result in results.items():
        same = sum(a == without_ids(b) for a, b in zip(first, result.answers, strict=True))
        rate = result.tokens / result.seconds
        print(
            f"{method:10} {result.valid_calls:4} of {len(first):3}"
            f" {same:4} of {len(first):3} {result.acceptance_length:12.2f} {rate:14.1f}"
        )


if __name__ == "__main__":
    main()
