"""A vLLM without a model: a small part of OpenAI's API on a Unix socket, with failures on demand.

    python -m tests.support.server.failing_vllm SOCKET FOLDER

The beginning of a prompt chooses the failure:

    die      it kills itself before anything is sent
    dead     it answers 500 and stays unhealthy
    stall    it answers 500 and then nothing for a second
    cut      it ends the answer halfway, like an abort of vLLM
    mid      it kills itself after three events
    half     it kills itself in the middle of an event
    slow     it answers slowly
    bad      it answers 400

Files in FOLDER:

    crash    it exits at once, with the code in the file
    sick     its health check answers 503
    odd      its list of models is malformed, as many times as the number in the file
    log      written by the server: the requests it received
    pids     written by the server: its pid and the pid of a child
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvicorn

METRICS = """# HELP vllm:generation_tokens_total Tokens.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="fake"} 7.0
# HELP vllm:num_requests_running Requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="fake"} 1.0
# HELP process_open_fds Open.
# TYPE process_open_fds gauge
process_open_fds 9.0
# HELP vllm:e2e_request_latency_seconds Seconds.
# TYPE vllm:e2e_request_latency_seconds histogram
vllm:e2e_request_latency_seconds_bucket{engine="0",le="1.0",model_name="fake"} 2.0
vllm:e2e_request_latency_seconds_bucket{engine="0",le="+Inf",model_name="fake"} 3.0
vllm:e2e_request_latency_seconds_count{engine="0",model_name="fake"} 3.0
vllm:e2e_request_latency_seconds_sum{engine="0",model_name="fake"} 4.5
"""
# The last events of a stream of vLLM, by endpoint.
LAST_EVENTS = {
    "/v1/messages": b'event: message_stop\ndata: {"type": "message_stop"}\n\n',
    "/v1/responses": b'event: response.completed\ndata: {"type": "response.completed"}\n\n',
}
TOO_LONG = {"message": "too long", "type": "BadRequestError", "param": "prompt", "code": 400}


class FailingVllm:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_dead = False

    def note(self, line: str) -> None:
        with (self.folder / "log").open("a") as file:
            file.write(line + "\n")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        if path == "/health":
            is_sick = self.is_dead or (self.folder / "sick").exists()
            await reply(send, 503 if is_sick else 200, b"")
        elif path == "/v1/models":
            await reply_json(send, 200, self.models())
        elif path == "/metrics":
            await reply(send, 200, METRICS.encode(), b"text/plain")
        else:
            await self.answer(scope, receive, send)

    def models(self) -> dict[str, Any]:
        odd = self.folder / "odd"
        if odd.exists() and (count := int(odd.read_text())) > 0:
            odd.write_text(str(count - 1))
            return {"data": None}
        return {"data": [{"id": "fake", "max_model_len": 77}]}

    async def answer(self, scope: Any, receive: Any, send: Any) -> None:
        body = json.loads(await read_body(receive))
        prompt = str(body.get("prompt", ""))
        headers = {key.decode(): value.decode() for key, value in scope["headers"]}
        request_id = headers.get("x-request-id")
        self.note(f"{scope['path']} {prompt} {request_id} {headers.get('authorization')}")
        if prompt.startswith("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        if prompt.startswith("dead"):
            self.is_dead = True
            await reply_json(send, 500, {"error": {"message": "EngineCore", "code": 500}})
        elif prompt.startswith("stall"):
            await reply_json(send, 500, {"error": {"message": "one bad request", "code": 500}})
            time.sleep(1)
        elif prompt.startswith("cut") and not body.get("stream"):
            await reply(send, 200, b'{"choices":[{"text":"half an ans","finish_reason":"abort"}]}')
        elif prompt.startswith("bad"):
            await reply_json(send, 400, {"error": TOO_LONG})
        elif body.get("stream"):
            last_event = LAST_EVENTS.get(scope["path"], b"data: [DONE]\n\n")
            await self.stream(prompt, int(body.get("max_tokens", 5)), receive, send, last_event)
        else:
            if prompt.startswith("slow"):
                await self.unless_disconnected(prompt, receive, asyncio.sleep(600))
            await reply_json(send, 200, {"body": body, "pid": os.getpid()})

    async def stream(
        self, prompt: str, count: int, receive: Any, send: Any, last_event: bytes
    ) -> None:
        await start(send, 200, b"text/event-stream")

        async def send_events() -> None:
            for i in range(count):
                data = json.dumps({"i": i, "pid": os.getpid()})
                event = f"data: {data}\n\n".encode()
                if prompt.startswith("cut") and i == 3:
                    event = b'data: {"choices":[{"text":"","finish_reason":"abort"}]}\n\n'
                if prompt.startswith("half") and i == 3:
                    await send_part(send, event[:9])
                    await asyncio.sleep(0.2)
                if prompt.startswith(("mid", "half")) and i == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                await send_part(send, event)
                await asyncio.sleep(0.03 if prompt.startswith(("slow", "half", "mid")) else 0)
            await send_part(send, last_event, more=False)

        await self.unless_disconnected(prompt, receive, send_events())

    async def unless_disconnected(
        self, prompt: str, receive: Callable[[], Awaitable[Any]], work: Any
    ) -> None:
        """Do the work, or note that the client disconnected before its end."""

        async def wait_for_disconnect() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        working = asyncio.ensure_future(work)
        disconnect = asyncio.ensure_future(wait_for_disconnect())
        await asyncio.wait({working, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            self.note(f"aborted {prompt}")
        for task in (working, disconnect):
            task.cancel()


async def read_body(receive: Any) -> bytes:
    data = b""
    more = True
    while more:
        message = await receive()
        data += message.get("body", b"")
        more = message.get("more_body", False)
    return data


async def start(send: Any, status: int, content_type: bytes) -> None:
    headers = [(b"content-type", content_type)]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def send_part(send: Any, body: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def reply(
    send: Any, status: int, body: bytes, content_type: bytes = b"application/json"
) -> None:
    await start(send, status, content_type)
    await send({"type": "http.response.body", "body": body})


async def reply_json(send: Any, status: int, body: dict[str, Any]) -> None:
    await reply(send, status, json.dumps(body).encode())


def main(socket: str, folder: Path) -> None:
    print("the fake vLLM says hello", flush=True)
    crash = folder / "crash"
    if crash.exists():
        print("out of memory, more or less", flush=True)
        sys.exit(int(crash.read_text()))
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    (folder / "pids").write_text(f"{os.getpid()} {child.pid}")
    uvicorn.run(FailingVllm(folder), uds=socket, log_level="warning", lifespan="off")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
