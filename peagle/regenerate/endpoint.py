"""Answers from an OpenAI-compatible chat endpoint that serves the same target elsewhere."""

import asyncio
import math
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx

from peagle.data.chat import Messages, encode_conversation, encode_prompt
from peagle.errors import UserError
from peagle.regenerate.answers import AnswerFile
from peagle.regenerate.job import Progress, RegenerateSettings
from peagle.regenerate.prompts import Prompt
from peagle.regenerate.repetition import is_looping, is_repetitive
from peagle.target import Target

CONCURRENCY = 64
MAX_TRIES = 6
FIRST_WAIT = 0.5  # seconds before the second try, doubled with every further try
MAX_WAIT = 30.0  # seconds
TIMEOUT = httpx.Timeout(600.0, connect=20.0)


def ask_all(
    target: Target,
    prompts: Sequence[Prompt],
    answers: AnswerFile,
    settings: RegenerateSettings,
    progress: Progress,
    deadline: float = math.inf,
) -> None:
    """Ask until `deadline` (of time.perf_counter).

    Ids and spans come from the target's tokenizer, because an endpoint returns text only.
    """
    asyncio.run(_ask_all(target, prompts, answers, settings, progress, deadline))


async def _ask_all(
    target: Target,
    prompts: Sequence[Prompt],
    answers: AnswerFile,
    settings: RegenerateSettings,
    progress: Progress,
    deadline: float,
) -> None:
    open_prompts = iter(prompts)
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(headers=headers, timeout=TIMEOUT) as client:
        endpoint = Endpoint(client, settings, target, deadline)

        async def work() -> None:
            for prompt in open_prompts:  # shared by all workers
                if endpoint.seconds_left() < 0:
                    break
                await _answer(endpoint, prompt, answers)
                progress(answers.counts.settled, len(prompts), answers.counts.generated)

        workers = [asyncio.create_task(work()) for _ in range(min(CONCURRENCY, len(prompts)))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)


async def _answer(endpoint: "Endpoint", prompt: Prompt, answers: AnswerFile) -> None:
    """Answer turn after turn; a conversation that ends early keeps its complete answers."""
    messages, ended = await endpoint.converse(prompt)
    if not messages and ended == "time":
        return  # The next run asks again.
    if not messages:
        answers.drop(prompt.key, ended or "empty")
        return
    try:
        ids, spans = encode_conversation(endpoint.target, messages)
    except UserError:
        raise
    except ValueError:
        answers.drop(prompt.key, "template")
        return
    line = {
        "key": prompt.key,
        "source": prompt.source,
        "temperature": prompt.temperature,
        "messages": messages,
    }
    answers.keep([line | {"ids": ids, "spans": spans} | ({"cut": ended} if ended else {})])
    answers.counts.generated = answers.counts.tokens


class Endpoint:
    def __init__(
        self,
        client: httpx.AsyncClient,
        settings: RegenerateSettings,
        target: Target,
        deadline: float = math.inf,
    ) -> None:
        assert settings.endpoint is not None
        url = settings.endpoint.rstrip("/")
        self.url = url if url.endswith("/chat/completions") else f"{url}/chat/completions"
        self.client = client
        self.settings = settings
        self.target = target
        self.max_prompt = settings.longest_prompt(target)
        self.deadline = deadline

    def seconds_left(self) -> float:
        return self.deadline - time.perf_counter()

    async def converse(self, prompt: Prompt) -> tuple[Messages, str | None]:
        """The messages up to the last complete answer, and why the conversation ended there."""
        messages: Messages = []
        for turn in prompt.turns:
            prompt_messages: Messages = [*messages, {"role": "user", "content": turn}]
            if ended := self._prompt_fault(prompt_messages):
                return messages, ended
            try:
                async with asyncio.timeout(self.seconds_left()):
                    text, reason = await self.ask(prompt_messages, prompt.temperature)
            except TimeoutError:
                return messages, "time"
            if ended := self._answer_fault(text, reason):
                return messages, ended
            messages = [*prompt_messages, {"role": "assistant", "content": text}]
        return messages, None

    def _answer_fault(self, text: str, reason: str) -> str | None:
        """Why an answer is dropped, by the rules for local answers; None: it is kept."""
        ids = self.target.tokenizer(text, add_special_tokens=False)["input_ids"]
        if not text.strip():
            return "empty"
        if is_looping(ids):
            return "looping"
        keep = self.settings.keep_truncated and not is_repetitive(ids)
        return "truncated" if reason == "length" and not keep else None

    def _prompt_fault(self, messages: Messages) -> str | None:
        try:
            return (
                "too long" if len(encode_prompt(self.target, messages)) > self.max_prompt else None
            )
        except UserError:
            raise
        except ValueError:
            return "template"

    async def ask(self, messages: Messages, temperature: float) -> tuple[str, str]:
        """Return (text, finish reason); retry after errors that may pass."""
        body = {
            "model": self.settings.model or self.target.name,
            "messages": messages,
            "temperature": temperature,
            "max_tokens": self.settings.max_tokens,
        }
        reason = ""
        for wait in waits():
            try:
                reply = await self.client.post(self.url, json=body)
            except httpx.TransportError as error:
                reason = str(error) or type(error).__name__
            except (httpx.InvalidURL, httpx.HTTPError) as error:
                raise UserError(f"cannot ask {self.url}: {error}") from error
            else:
                if reply.status_code == 200:
                    return self._read(reply)
                reason = f"HTTP {reply.status_code}: {' '.join(reply.text.split())[:200]}"
                if reply.status_code != 429 and reply.status_code < 500:
                    raise UserError(f"the endpoint {self.url} refuses: {reason}")
                wait = max(wait, _retry_after(reply))
            await asyncio.sleep(wait)
        raise UserError(
            f"the endpoint {self.url} did not answer in {MAX_TRIES} tries, the last: {reason}"
        )

    def _read(self, reply: httpx.Response) -> tuple[str, str]:
        try:
            choice: Any = reply.json()["choices"][0]
            return choice["message"]["content"] or "", choice.get("finish_reason") or "stop"
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise UserError(
                f"{self.url} is not a chat endpoint: its answer has no choices[0].message.content"
            ) from error


def waits() -> Iterator[float]:
    """Seconds to wait after each failed try; 0 after the last."""
    for i in range(MAX_TRIES):
        yield min(FIRST_WAIT * 2**i, MAX_WAIT) if i + 1 < MAX_TRIES else 0.0


def _retry_after(reply: httpx.Response) -> float:
    try:
        return min(float(reply.headers.get("retry-after", 0)), MAX_WAIT)
    except ValueError:  # a date
        return 0.0
