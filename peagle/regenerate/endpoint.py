"""An OpenAI-compatible chat endpoint answers instead: the same target, served elsewhere."""

import asyncio
import os
from collections.abc import Iterator, Sequence
from typing import Any

import httpx

from peagle.data.chat import Messages, encode_conversation, encode_prompt
from peagle.errors import UserError
from peagle.regenerate.answers import AnswerFile
from peagle.regenerate.job import Progress, RegenerateSettings
from peagle.regenerate.loops import is_looping, repetitive
from peagle.regenerate.prompts import Prompt
from peagle.target import Target

CONCURRENCY = 64
TRIES = 6
WAIT, LONGEST_WAIT = 0.5, 30.0  # seconds before a second try, doubled from try to try
TIMEOUT = httpx.Timeout(600.0, connect=20.0)


def ask_all(
    target: Target,
    prompts: Sequence[Prompt],
    answers: AnswerFile,
    settings: RegenerateSettings,
    progress: Progress,
) -> None:
    """Ids and spans come from the target's tokenizer: an endpoint tells text only."""
    asyncio.run(_ask_all(target, prompts, answers, settings, progress))


async def _ask_all(
    target: Target,
    prompts: Sequence[Prompt],
    answers: AnswerFile,
    settings: RegenerateSettings,
    progress: Progress,
) -> None:
    left = iter(prompts)
    key = os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(headers=headers, timeout=TIMEOUT) as client:
        endpoint = Endpoint(client, settings, target)

        async def work() -> None:
            for prompt in left:  # shared: each takes the next
                await _settle(endpoint, prompt, answers)
                progress(answers.counts.settled, len(prompts), answers.counts.generated)

        workers = [asyncio.create_task(work()) for _ in range(min(CONCURRENCY, len(prompts)))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)


async def _settle(endpoint: "Endpoint", prompt: Prompt, answers: AnswerFile) -> None:
    """Answers turn after turn; a conversation that ends early keeps the answers that are whole."""
    messages, ended = await endpoint.converse(prompt)
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
        self, client: httpx.AsyncClient, settings: RegenerateSettings, target: Target
    ) -> None:
        assert settings.endpoint is not None
        url = settings.endpoint.rstrip("/")
        self.url = url if url.endswith("/chat/completions") else f"{url}/chat/completions"
        self.client, self.settings, self.target = client, settings, target
        self.longest = settings.longest_prompt(target)

    async def converse(self, prompt: Prompt) -> tuple[Messages, str | None]:
        """The messages up to the last whole answer, and why it is not the last turn's."""
        messages: Messages = []
        for turn in prompt.turns:
            asked: Messages = [*messages, {"role": "user", "content": turn}]
            if ended := self._misfit(asked):
                return messages, ended
            text, reason = await self.ask(asked, prompt.temperature)
            if ended := self._unfit(text, reason):
                return messages, ended
            messages = [*asked, {"role": "assistant", "content": text}]
        return messages, None

    def _unfit(self, text: str, reason: str) -> str | None:
        """Why an answer is dropped, if it is: as those the target gives here."""
        ids = self.target.tokenizer(text, add_special_tokens=False)["input_ids"]
        if not text.strip():
            return "empty"
        if is_looping(ids):
            return "looping"
        kept = self.settings.keep_truncated and not repetitive(ids)
        return "truncated" if reason == "length" and not kept else None

    def _misfit(self, messages: Messages) -> str | None:
        try:
            return "too long" if len(encode_prompt(self.target, messages)) > self.longest else None
        except UserError:
            raise
        except ValueError:
            return "template"

    async def ask(self, messages: Messages, temperature: float) -> tuple[str, str]:
        """(text, finish reason). Waits and tries again where that may help."""
        body = {
            "model": self.settings.model or self.target.name,
            "messages": messages,
            "temperature": temperature,
            "max_tokens": self.settings.max_tokens,
        }
        trouble = ""
        for wait in waits():
            try:
                reply = await self.client.post(self.url, json=body)
            except httpx.TransportError as error:
                trouble = str(error) or type(error).__name__
            except (httpx.InvalidURL, httpx.HTTPError) as error:
                raise UserError(f"cannot ask {self.url}: {error}") from error
            else:
                if reply.status_code == 200:
                    return self._read(reply)
                trouble = f"HTTP {reply.status_code}: {' '.join(reply.text.split())[:200]}"
                if reply.status_code != 429 and reply.status_code < 500:
                    raise UserError(f"the endpoint {self.url} refuses: {trouble}")
                wait = max(wait, _retry_after(reply))
            await asyncio.sleep(wait)
        raise UserError(
            f"the endpoint {self.url} did not answer in {TRIES} tries, the last: {trouble}"
        )

    def _read(self, reply: httpx.Response) -> tuple[str, str]:
        try:
            choice: Any = reply.json()["choices"][0]
            return choice["message"]["content"] or "", choice.get("finish_reason") or "stop"
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise UserError(
                f"{self.url} is no chat endpoint: its answer has no choices[0].message.content"
            ) from error


def waits() -> Iterator[float]:
    """How long to wait after each failed try; none after the last."""
    for i in range(TRIES):
        yield min(WAIT * 2**i, LONGEST_WAIT) if i + 1 < TRIES else 0.0


def _retry_after(reply: httpx.Response) -> float:
    try:
        return min(float(reply.headers.get("retry-after", 0)), LONGEST_WAIT)
    except ValueError:  # a date
        return 0.0
