"""HttpEndpoint: an OpenAI-compatible server, as `peagle verify` asks it."""

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import httpx

from peagle.bench.load.endpoint import endpoint_urls
from peagle.bench.load.endpoint_client import (
    CONNECT_TIMEOUT,
    READ_TIMEOUT,
    authorization,
    describe_error,
)
from peagle.bench.load.server_metrics import parse_metrics
from peagle.deploy.response import join_lines, parse_events
from peagle.deploy.verify.answer import Answer, chat_request, read_answer
from peagle.deploy.verify.endpoint import Cause, Observation, Observe
from peagle.errors import UserError
from peagle.results.spec_counters import SpecCounters

WITHOUT_DRAFTS = {"peagle": {"method": "none"}}  # the per-request switch of `peagle serve`
MAX_QUOTED = 300
PEAGLE_NONE = Cause(
    "the server runs the method none", "start it with a drafter and --method p-eagle"
)
PEAGLE_ADAPTIVE = Cause(
    "adaptive drafting expects no gain on this machine at its current load",
    "verify again without other load, or start the server with a fixed K, as with -k 5;"
    " /v1/peagle/status shows what it measured",
)
VLLM_OFF = Cause(
    "the server was started without a speculative config",
    "start it with --speculative-config; `peagle deploy vllm PAIR` writes the command",
)
NO_DRAFTS = Cause(
    "the server counts drafts, but made none for these requests",
    "verify each replica at its own URL; the server's log says whether it disables drafting",
)


class HttpEndpoint:
    evidence_fix = (
        "make /metrics reachable at the same host, or start vLLM 0.32 or later with"
        " --per-request-spec-decode-metrics summary; behind a load balancer, verify each replica"
        " at its own URL"
    )

    def __init__(self, url: str, model: str | None = None, api_key: str | None = None) -> None:
        self.name = url
        self.chat_url, self.models_url, self.metrics_url = endpoint_urls(url)
        timeout = httpx.Timeout(READ_TIMEOUT, connect=CONNECT_TIMEOUT)
        self.client = httpx.Client(headers=authorization(api_key), timeout=timeout)
        card = self._first_model()
        self.model = model if model is not None else str(card.get("id", ""))
        owner = card.get("owned_by")
        self.kind = owner if owner in ("peagle", "vllm") else "openai"

    @property
    def has_switch(self) -> bool:
        return "none" in (self.status.get("methods") or [])

    def ask(self, prompt: str, max_tokens: int, drafts: bool = True) -> Answer:
        """`drafts`: False only with `has_switch`."""
        switch = {} if drafts else WITHOUT_DRAFTS
        body = {"model": self.model, **chat_request(prompt, max_tokens), **switch}
        try:
            return read_answer(self._events(body))
        except httpx.HTTPError as error:
            raise UserError(f"no answer from {self.chat_url}: {describe_error(error)}") from error

    def watch(self) -> Observe:
        before = self._read_metrics()

        def observe() -> Observation | None:
            after = self._read_metrics()
            if before is None or after is None:
                return None
            counters = parse_metrics(after)
            if counters is not None:
                earlier = parse_metrics(before) or SpecCounters()
                spec = counters.minus(earlier)
                # Fewer than before: another replica, or the server was restarted.
                return Observation("metrics", spec) if spec.drafts >= 0 else None
            # vLLM exports the counters whenever it has a drafter.
            return Observation("metrics", None) if "vllm:" in after else None

        return observe

    def explain(self, has_counters: bool) -> Cause:
        if self.status.get("method") == "none":
            return PEAGLE_NONE
        if self.status.get("k") == "auto":
            return PEAGLE_ADAPTIVE
        return NO_DRAFTS if has_counters else VLLM_OFF

    @cached_property
    def status(self) -> dict[str, Any]:
        """Methods and K of a `peagle serve` that has answered; before, it may still be loading."""
        if self.kind != "peagle":
            return {}
        try:
            url = self.models_url.removesuffix("models") + "peagle/status"
            return dict(self.client.get(url, timeout=CONNECT_TIMEOUT).json())
        except (httpx.HTTPError, ValueError, TypeError):
            return {}

    def _read_metrics(self) -> str | None:
        try:
            reply = self.client.get(self.metrics_url, timeout=CONNECT_TIMEOUT)
        except httpx.HTTPError:
            return None
        return reply.text if reply.status_code == 200 else None

    def _first_model(self) -> dict[str, Any]:
        """The card of the first model; empty for a server that lists none but may still answer."""
        try:
            reply = self.client.get(self.models_url, timeout=CONNECT_TIMEOUT)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise UserError(
                f"no answer from {self.models_url} ({describe_error(error)}):"
                " start the server, or correct the URL"
            ) from error
        if reply.status_code in (401, 403) or reply.has_redirect_location:
            self._require_success(reply)
        try:
            return dict(reply.json()["data"][0])
        except (ValueError, KeyError, IndexError, TypeError):
            return {}

    def _events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with self.client.stream("POST", self.chat_url, json=body) as reply:
            self._require_success(reply)
            kind = reply.headers.get("content-type", "")
            if not kind.startswith("text/event-stream"):
                raise UserError(
                    f"{self.chat_url} answers with {kind or 'no content type'} instead of a stream"
                    " of events: correct the URL"
                )
            yield from parse_events(join_lines(reply.iter_bytes()))

    def _require_success(self, reply: httpx.Response) -> None:
        status = reply.status_code
        if status in (401, 403):
            raise UserError(f"{self.name} answers {status}: give its key with `api_key`")
        if reply.has_redirect_location:
            raise UserError(
                f"{self.name} redirects to {reply.headers['location']}: use the URL of that server"
            )
        if status != 200:
            text = " ".join(reply.read().decode(errors="replace").split())
            raise UserError(f"{reply.url} answers {status}: {text[:MAX_QUOTED]}")
