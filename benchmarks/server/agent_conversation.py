"""The share of prompt tokens that an agent's conversation finds in the prefix cache.

    python -m benchmarks.server.agent_conversation [--pair smollm2-135m] [--turns 10]
    python -m benchmarks.server.agent_conversation --url http://127.0.0.1:8000

A system prompt with descriptions of tools and a request of the user come first; then answers of the
pair and results of tools alternate. Results and lengths of answers are the same in every run. Every
turn sends the whole conversation, as agents do. Without `--url` an engine runs in this process, and
the tokens that the cache misses are counted by cause:

    text    the answer's text has other tokens than those that were generated
    page    the rest of the last common page: pages are shared whole
"""

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import httpx

from peagle.catalog import DEFAULT_PAIR
from peagle.engine import Engine, EngineConfig
from peagle.engine.config import PAGE_SIZE

Message = dict[str, str]
TOOLS = {
    "read_file": ("Read a file of the repository.", ("path", "first_line", "last_line")),
    "write_file": ("Replace the contents of a file, or create it.", ("path", "text")),
    "list_folder": ("List the files and folders below a path.", ("path", "depth", "pattern")),
    "search_code": ("Search all files for a regular expression.", ("pattern", "folder", "limit")),
    "run_tests": ("Run the test suite and report failures.", ("folder", "name", "timeout")),
    "run_command": ("Run a command in a shell without network.", ("command", "timeout")),
    "git_diff": ("Show the changes of the working tree.", ("path", "context_lines")),
}
# fmt: off
WORDS = (
    "parser", "cache", "token", "request", "buffer", "stream", "index", "loader", "config",
    "queue", "worker", "page", "value", "result", "handler", "record", "table", "session",
    "client", "offset",
)
# fmt: on


def system_prompt() -> str:
    """Rules of a coding agent and the JSON schemas of its tools."""
    rules = (
        "You are a coding agent in a repository of Python packages. Work in small steps. Before"
        " you change a file, read it. After a change, run the tests that cover it. Say in one or"
        " two sentences what you do and why, then call one tool. Never invent the contents of a"
        " file or the output of a command. Stop when the request is fulfilled and the tests pass."
    )
    schemas = []
    for name, (description, parameters) in TOOLS.items():
        properties = {
            parameter: {
                "type": "integer" if parameter.endswith(("line", "lines", "limit")) else "string",
                "description": f"The {parameter.replace('_', ' ')} of {name.replace('_', ' ')}.",
            }
            for parameter in parameters
        }
        schema = {"type": "object", "properties": properties, "required": [parameters[0]]}
        schemas.append(json.dumps({"name": name, "description": description, "parameters": schema}))
    return f"{rules}\n\nTools, one JSON object per line:\n" + "\n".join(schemas)


def tool_result(rng: random.Random) -> str:
    """The output of a tool: a listing, lines of code, or a test report."""
    lines = rng.randint(4, 18)
    kind = rng.choice(("listing", "code", "tests"))
    rows = []
    for number in range(1, lines + 1):
        first, second = rng.sample(WORDS, 2)
        if kind == "listing":
            rows.append(f"src/{first}/{second}.py  {rng.randint(200, 9999)} bytes")
        elif kind == "code":
            rows.append(f"{number:4d}      self.{first} = {second}({rng.randint(1, 99)})")
        else:
            rows.append(f"tests/test_{first}.py::test_{second}_{number} PASSED")
    return "\n".join(rows)


@dataclass(frozen=True, slots=True)
class Turn:
    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int
    # Tokens of the turn before that this one does not find, by cause; None: not known.
    lost_by_text: int | None = None
    lost_by_page: int | None = None


class Server(Protocol):
    def answer(self, messages: list[Message], max_tokens: int) -> tuple[str, Turn]:
        """The answer's text, and what the turn has found in the cache."""


def converse(server: Server, turns: int, seed: int = 0) -> Iterator[Turn]:
    rng = random.Random(seed)
    messages = [
        {"role": "system", "content": system_prompt()},
        {
            "role": "user",
            "content": "The request parser drops the last record of a file without a final newline."
            " Find the cause, repair it and add a test.",
        },
    ]
    for _ in range(turns):
        text, turn = server.answer(messages, rng.randint(60, 150))
        yield turn
        messages.append({"role": "assistant", "content": text})
        # Not every chat template has the role "tool".
        messages.append({"role": "user", "content": f"Output of the tool:\n{tool_result(rng)}"})


class HttpServer:
    """A server under `--url`."""

    def __init__(self, url: str, temperature: float = 0.0) -> None:
        self.temperature = temperature
        self.client = httpx.Client(base_url=url, timeout=600)

    def answer(self, messages: list[Message], max_tokens: int) -> tuple[str, Turn]:
        body = {
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": self.temperature,
            "seed": len(messages),
        }
        response = self.client.post("/v1/chat/completions", json=body).raise_for_status().json()
        usage = response["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        turn = Turn(usage["prompt_tokens"], cached, usage["completion_tokens"])
        return response["choices"][0]["message"]["content"], turn


@dataclass(slots=True)
class EngineServer:
    """An engine in this process."""

    engine: Engine
    temperature: float = 0.0
    known: list[int] = field(default_factory=list)  # Tokens of the turn before, answer included.

    def answer(self, messages: list[Message], max_tokens: int) -> tuple[str, Turn]:
        tokenizer = self.engine.target.tokenizer
        assert tokenizer is not None
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True
        )["input_ids"]
        stream = self.engine.add(
            prompt, max_tokens=max_tokens, temperature=self.temperature, seed=len(messages)
        )
        text = ""
        tokens: list[int] = []
        for piece in stream:
            text += piece.text
            tokens += piece.step.tokens if piece.step is not None else ()
        cached = stream.cached_tokens or 0
        common = common_prefix(self.known, prompt)
        turn = Turn(
            len(prompt), cached, len(tokens), len(self.known) - common, max(0, common - cached)
        )
        self.known = [*prompt, *tokens]
        return text, turn


def common_prefix(first: list[int], second: list[int]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def count_text(count: int | None) -> str:
    return "-" if count is None else str(count)


def print_turns(server: Server, turns: int, seed: int) -> None:
    print("turn  prompt  cached  share  answer  lost: text  page")
    prompt = cached = 0
    for number, turn in enumerate(converse(server, turns, seed), 1):
        prompt += turn.prompt_tokens
        cached += turn.cached_tokens
        print(
            f"{number:4}  {turn.prompt_tokens:6}  {turn.cached_tokens:6}"
            f"  {turn.cached_tokens / turn.prompt_tokens:5.1%}  {turn.answer_tokens:6}"
            f"  {count_text(turn.lost_by_text):>10}  {count_text(turn.lost_by_page):>4}"
        )
    print(f" all  {prompt:6}  {cached:6}  {cached / prompt:5.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", default=DEFAULT_PAIR)
    parser.add_argument("--url", help="a running server, instead of an engine in this process")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--page-size", type=int, default=PAGE_SIZE)
    arguments = parser.parse_args()
    if arguments.url:
        http_server = HttpServer(arguments.url, arguments.temperature)
        print_turns(http_server, arguments.turns, arguments.seed)
        return
    # Exact mode without batch-invariant kernels has no prefix cache.
    config = EngineConfig(max_batch=1, page_size=arguments.page_size, exact=False)
    with Engine(arguments.pair, config) as engine:
        engine_server = EngineServer(engine, arguments.temperature)
        print_turns(engine_server, arguments.turns, arguments.seed)


if __name__ == "__main__":
    main()
