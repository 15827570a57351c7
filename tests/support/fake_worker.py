"""A worker without a model: a little of OpenAI's API on a Unix socket, and everything that goes wrong.

python -m tests.fake_worker SOCKET FOLDER NAME

What a prompt begins with chooses the trouble: `die` (before anything is sent), `dead` (it answers 500 and is unwell
from then on), `stall` (it answers 500 and then nothing, for a second), `cut` (half an answer, as vLLM aborts), `mid`
(after three events), `half` (in the middle of an event), `slow`, `bad`; `die@NAME` is for that worker alone. Files in
FOLDER: `crash-NAME` (it ends at once,
with the code the file holds), `sick-NAME` (its health is 503); NAME.log tells what came in.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
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
# HELP peagle:engine_up Up.
# TYPE peagle:engine_up gauge
peagle:engine_up{model_name="fake"} 1.0
# HELP vllm:e2e_request_latency_seconds Seconds.
# TYPE vllm:e2e_request_latency_seconds histogram
vllm:e2e_request_latency_seconds_bucket{engine="0",le="1.0",model_name="fake"} 2.0
vllm:e2e_request_latency_seconds_bucket{engine="0",le="+Inf",model_name="fake"} 3.0
vllm:e2e_request_latency_seconds_count{engine="0",model_name="fake"} 3.0
vllm:e2e_request_latency_seconds_sum{engine="0",model_name="fake"} 4.5
"""


class Fake:
    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name, self.unwell = folder, name, False

    def note(self, line: str) -> None:
        with (self.folder / f"{self.name}.log").open("a") as file:
            file.write(line + "\n")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        if path == "/health":
            sick = self.unwell or (self.folder / f"sick-{self.name}").exists()
            await reply(send, 503 if sick else 200, b"")
        elif path == "/v1/models":
            await reply(
                send, 200, json.dumps({"data": [{"id": "fake", "max_model_len": 77}]}).encode()
            )
        elif path == "/metrics":
            await reply(send, 200, METRICS.encode(), b"text/plain")
        else:
            await self.answer(scope, receive, send)

    async def answer(self, scope: Any, receive: Any, send: Any) -> None:
        data, more = b"", True
        while more:
            message = await receive()
            data, more = data + message.get("body", b""), message.get("more_body", False)
        body = json.loads(data)
        prompt = str(body.get("prompt", ""))
        headers = {key.decode(): value.decode() for key, value in scope["headers"]}
        self.note(
            f"{scope['path']} {prompt} {headers.get('x-request-id')} {headers.get('authorization')}"
        )
        if prompt.partition("@")[2] not in ("", self.name):
            prompt = "hello"
        if prompt.startswith("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        if prompt.startswith("dead"):
            self.unwell = True
            await reply(send, 500, b'{"error": {"message": "EngineCore", "code": 500}}')
        elif prompt.startswith("stall"):
            await reply(send, 500, b'{"error": {"message": "one bad request", "code": 500}}')
            time.sleep(1)
        elif prompt.startswith("cut") and not body.get("stream"):
            await reply(send, 200, b'{"choices":[{"text":"half an ans","finish_reason":"abort"}]}')
        elif prompt.startswith("bad"):
            error = {
                "error": {
                    "message": "too long",
                    "type": "BadRequestError",
                    "param": "prompt",
                    "code": 400,
                }
            }
            await reply(send, 400, json.dumps(error).encode())
        elif body.get("stream"):
            await self.stream(prompt, int(body.get("max_tokens", 5)), receive, send)
        else:
            if prompt.startswith("slow"):
                await unless_left(
                    receive, asyncio.sleep(30), lambda: self.note(f"aborted {prompt}")
                )
            await reply(
                send,
                200,
                json.dumps({"worker": self.name, "body": body, "pid": os.getpid()}).encode(),
            )

    async def stream(self, prompt: str, count: int, receive: Any, send: Any) -> None:
        await start(send, 200, b"text/event-stream")

        async def events() -> None:
            for i in range(count):
                event = f"data: {json.dumps({'i': i, 'worker': self.name, 'pid': os.getpid()})}\n\n".encode()
                if prompt.startswith("cut") and i == 3:
                    event = b'data: {"choices":[{"text":"","finish_reason":"abort"}]}\n\n'
                if prompt.startswith("half") and i == 3:
                    await send({"type": "http.response.body", "body": event[:9], "more_body": True})
                    await asyncio.sleep(0.2)
                if prompt.startswith(("mid", "half")) and i == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                await send({"type": "http.response.body", "body": event, "more_body": True})
                await asyncio.sleep(0.03 if prompt.startswith(("slow", "half", "mid")) else 0)
            await send(
                {"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False}
            )

        await unless_left(receive, events(), lambda: self.note(f"aborted {prompt}"))


async def unless_left(receive: Any, work: Any, told: Any) -> None:
    async def left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(left())
    await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
    if not working.done():
        told()
    for task in (working, leaving):
        task.cancel()


async def start(send: Any, status: int, kind: bytes) -> None:
    await send(
        {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]}
    )


async def reply(send: Any, status: int, body: bytes, kind: bytes = b"application/json") -> None:
    await start(send, status, kind)
    await send({"type": "http.response.body", "body": body})


def main(socket: str, folder: Path, name: str) -> None:
    print(f"fake worker {name} says hello", flush=True)
    crash = folder / f"crash-{name}"
    if crash.exists():
        print("out of memory, more or less", flush=True)
        sys.exit(int(crash.read_text()))
    left_behind = subprocess.Popen(["sleep", "600"], start_new_session=True)
    (folder / f"{name}.pids").write_text(f"{os.getpid()} {left_behind.pid}")
    uvicorn.run(Fake(folder, name), uds=socket, log_level="warning", lifespan="off")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
