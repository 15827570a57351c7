"""The backend over vLLM: it checks requests and relays them; health and limits are its own."""

import asyncio
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import Request, Response

from peagle.server.http.backend import RouteHandler, check_model_name
from peagle.server.http.cache_salt import with_salt
from peagle.server.http.drain import Drain
from peagle.server.http.errors import ApiError
from peagle.server.http.logs import request_log_fields
from peagle.server.http.response_counts import ResponseCounts
from peagle.server.http.sse import cancel_on_disconnect
from peagle.server.settings import ServerSettings
from peagle.server.supervisor.process_supervisor import start_task
from peagle.server.supervisor.socket_folder import create_socket_folder
from peagle.server.vllm.peagle_field import without_peagle_field
from peagle.server.vllm.relay import Relay
from peagle.server.vllm.vllm_launch import VllmLaunch, prepare_launch
from peagle.server.vllm.vllm_metrics import GatewayMetrics, parse_vllm_metrics, render_metrics
from peagle.server.vllm.vllm_process import VllmProcess

RELAYED_PATHS = {
    "chat": "/v1/chat/completions",
    "complete": "/v1/completions",
    "create_response": "/v1/responses",
    "create_message": "/v1/messages",
    "count_tokens": "/v1/messages/count_tokens",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
}
# vLLM's /v1/messages knows no salt.
SALTED_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


class Gateway:
    def __init__(
        self, settings: ServerSettings, prepare: Callable[[Path], VllmLaunch] | None = None
    ) -> None:
        """`prepare`: see VllmProcess; tests start a process of their own."""
        self.settings = settings
        self.drain = Drain(settings.drain_seconds)
        self.model_name = settings.model_names[0]
        self.response_counts = ResponseCounts(self.model_name)
        self._folder = create_socket_folder()
        prepare = prepare or partial(prepare_launch, settings)
        self.process = VllmProcess(prepare, self._folder, settings.backoff)
        self._relay = Relay(self.process, self.drain, settings.timeout)
        self._task: asyncio.Task[None] | None = None

    @property
    def route_handlers(self) -> Mapping[str, RouteHandler]:
        relayed = {name: self._relay_handler(path) for name, path in RELAYED_PATHS.items()}
        own = {
            "retrieve_response": not_stored,
            "delete_response": not_stored,
            "show_drafter": no_versions,
            "change_drafter": no_versions,
        }
        return relayed | own

    @property
    def is_healthy(self) -> bool:
        return self.process.state == "ready" and not self.drain.is_draining

    @property
    def unavailable_reason(self) -> str:
        return self.process.unavailable_reason

    @property
    def context(self) -> int:
        return self.process.context

    @property
    def in_flight(self) -> int:
        return len(self.drain.in_flight)

    async def start(self, on_failure: Callable[[str], None]) -> None:
        self._task = start_task(self.process.run(), on_failure)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def status(self) -> dict[str, Any]:
        process = self.process
        text = await process.metrics()
        method = process.launch.method if process.launch else self.settings.method or "none"
        k = process.launch.k if process.launch else 0
        engine = {"k": k, "k_reason": "vLLM's K is fixed"}
        state = "restarting" if process.was_ready else "loading"
        return {
            "model": self.model_name,
            "state": "ready" if process.state == "ready" else state,
            "restarts": process.restarts,
            "methods": [method],
            "method": method,
            "k": k,
            "engines": {method: parse_vllm_metrics(text) | engine} if text else {},
            "workers": [process.status() | {"in_flight": self.in_flight}],
        }

    async def metrics(self) -> bytes:
        own = GatewayMetrics(self.process, self.model_name, self.in_flight)
        return render_metrics(await self.process.metrics(), own, self.response_counts)

    def _relay_handler(self, path: str) -> RouteHandler:
        async def relay(request: Request, body: dict[str, Any]) -> Response:
            body = self._check_request(body)
            if path in SALTED_PATHS:
                body = with_salt(request.scope, body)
            if self.settings.log_prompts:
                prompt = body.get("messages") or body.get("prompt") or body.get("input")
                request_log_fields(request.scope)["prompt"] = prompt
            return await cancel_on_disconnect(request, self._relay.send(request, path, body))

        return relay

    def _check_request(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body that vLLM gets. ApiError: the request is refused."""
        self.drain.check_accepting()
        check_model_name(body.get("model"), self.settings.model_names)
        body = without_peagle_field(body, self.process.require_ready())
        if self.in_flight >= self.settings.max_queue + self.settings.max_batch:
            message = f"{self.in_flight} requests are running: try again later"
            raise ApiError(429, message, retry_after=1)
        return body


async def not_stored(_: Request, __: dict[str, Any]) -> Response:
    raise ApiError(404, "responses are not stored with engine vllm: keep them in the client")


async def no_versions(_: Request, __: dict[str, Any]) -> Response:
    raise ApiError(404, "the drafter of engine vllm has no versions: use --engine native --learn")
