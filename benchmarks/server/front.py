"""How many tokens a second one front of `peagle serve` can stream: engine and weights left out.

    python -m benchmarks.server.front [--streams 1,8,64,256] [--step-ms 0.7,1.1,2.7,7]
        [--tokens 256]

A process takes the place of the engine: every step it sends each request 3 or 4 tokens, as fast as
the steps of an H200 with the default pair. The front is the real one. A front that is too slow
falls behind its engine; what counts is its CPU time per token, which other processes disturb least.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from benchmarks.server.load import Load
from peagle.server import messages
from peagle.server.messages import (
    EngineInfo,
    EngineKey,
    EngineState,
    FrontBatch,
    Output,
    ServerState,
    TargetInfo,
    WorkerBatch,
    WorkerStatus,
)

TOKENS_OF_A_STEP = (3, 4)
FIRST_TOKEN = 300  # Of those that the answers repeat: ordinary words.
TOKEN_COUNT = 500
CONTEXT = 4096
READY_SECONDS = 60.0


class PacedEngine:
    """Answers every request with tokens, some each step."""

    def __init__(self, address: str, folder: str, step_seconds: float) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context().socket(zmq.ROUTER)
        self.socket.bind(address)
        self.step_seconds = step_seconds
        self.left: dict[int, int] = {}  # request -> tokens
        self.steps = 0
        engine = EngineInfo("p-eagle", CONTEXT, 49152)
        key = EngineKey("p-eagle", 7)
        self.target = TargetInfo("front", folder, [0], engine, key, ["p-eagle"])

    def run(self) -> None:
        front = b""
        next_step = next_status = time.perf_counter()
        while True:
            batch = WorkerBatch()
            if time.perf_counter() > next_status:
                batch.status = WorkerStatus(self.target, pid=os.getpid())
                next_status = time.perf_counter() + 0.5
            while self.socket.poll(0):
                front, payload = self.socket.recv_multipart()
                self.receive(messages.decode_front(payload), batch)
            self.step(batch)
            if front and (batch.outputs or batch.status or batch.accepted):
                self.socket.send_multipart([front, messages.encode(batch)])
            next_step = max(next_step + self.step_seconds, time.perf_counter())
            time.sleep(max(0.0, next_step - time.perf_counter()))

    def receive(self, sent: FrontBatch, batch: WorkerBatch) -> None:
        for add in sent.adds:
            self.left[add.id] = add.max_tokens
            batch.accepted.append(add.id)
        for abort in sent.aborts:
            self.left.pop(abort.id, None)

    def step(self, batch: WorkerBatch) -> None:
        self.steps += 1
        for request, left in list(self.left.items()):
            count = min(left, TOKENS_OF_A_STEP[self.steps % 2])
            first = FIRST_TOKEN + 7 * (self.steps + request) % TOKEN_COUNT
            output = Output(request, list(range(first, first + count)), 7, count - 1)
            self.left[request] -= count
            if not self.left[request]:
                del self.left[request]
                output.reason = "length"
            batch.outputs.append(output)


class FixedSource:
    """The one engine process, which never ends."""

    def __init__(self, address: str) -> None:
        self.address = address

    def start(
        self, on_state: Callable[[ServerState], None], on_failure: Callable[[str], None]
    ) -> None:
        on_state(ServerState([EngineState("engine", self.address, running=True)]))

    async def close(self) -> None:
        pass


def run_front(address: str, port: int) -> None:
    from peagle.server.front.engine_client import EngineClient
    from peagle.server.http.logs import set_up_logging
    from peagle.server.listener import listen
    from peagle.server.routes import create_engine_backend
    from peagle.server.settings import ServerSettings
    from peagle.server.web_server import Server

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # One line per request.
    set_up_logging()
    settings = ServerSettings(pair="smollm2-135m", port=port, max_batch=1024)
    client = EngineClient(settings, FixedSource(address))
    Server(create_engine_backend(settings, client)).run(sockets=[listen("127.0.0.1", port)])


def run_engine(address: str, folder: str, step_seconds: float) -> None:
    PacedEngine(address, folder, step_seconds).run()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def wait_until_ready(load: Load) -> None:
    import httpx

    async with httpx.AsyncClient() as client:
        for _ in range(int(READY_SECONDS / 0.2)):
            try:
                if (await client.get(load.url.geturl() + "/health")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.2)
    raise TimeoutError("the front was not ready in time")


async def measure(streams: int, seconds: float, tokens: int, port: int, pid: int) -> None:
    load = Load(f"http://127.0.0.1:{port}", tokens)
    await wait_until_ready(load)
    warm_up = time.perf_counter() + 1.0
    await asyncio.gather(*(load.user(i, warm_up) for i in range(streams)))
    load.generated_tokens = 0
    load.first_token_seconds.clear()
    cpu = cpu_seconds(pid)
    start = time.perf_counter()
    await asyncio.gather(*(load.user(i, start + seconds) for i in range(streams)))
    spent = time.perf_counter() - start
    front_seconds = cpu_seconds(pid) - cpu
    first = sorted(load.first_token_seconds)
    print(
        json.dumps(
            {
                "streams": streams,
                "tokens_per_second": round(load.generated_tokens / spent),
                "tokens_per_cpu_second": round(load.generated_tokens / front_seconds),
                "front_cpu": round(front_seconds / spent, 2),
                "ttft_p50_ms": round(1000 * first[len(first) // 2], 1),
                "ttft_p99_ms": round(1000 * first[int(len(first) * 0.99)], 1),
                "errors": load.errors,
            }
        ),
        flush=True,
    )


def main() -> None:
    from peagle.catalog.catalog import find_pair
    from peagle.pull.pull import target_folder

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", default="1,8,64,256")
    parser.add_argument("--step-ms", default="0.7,1.1,2.7,7")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--port", type=int, default=8123)
    options = parser.parse_args()
    folder = str(target_folder(find_pair("smollm2-135m")))
    context = multiprocessing.get_context("spawn")
    for number, (streams, step) in enumerate(
        zip(options.streams.split(","), options.step_ms.split(","), strict=True)
    ):
        port = options.port + number
        address = f"ipc:///tmp/peagle-front-{os.getpid()}-{number}"
        engine = context.Process(
            target=run_engine, args=(address, folder, float(step) / 1000), daemon=True
        )
        front = context.Process(target=run_front, args=(address, port), daemon=True)
        engine.start()
        front.start()
        assert front.pid is not None
        try:
            asyncio.run(measure(int(streams), options.seconds, options.tokens, port, front.pid))
        finally:
            for process in (front, engine):
                process.kill()
                process.join()


if __name__ == "__main__":
    main()
