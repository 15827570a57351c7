"""The workers of a server, started and closed together; a request goes to the ready one with the fewest under way."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Any

import httpx

from peagle.errors import UserError
from peagle.server.http.errors import ApiError
from peagle.server.workers.worker import Launch, Worker


class WorkerSet:
    def __init__(self) -> None:
        self.all: list[Worker] = []
        self._tasks: list[asyncio.Task[None]] = []

    def start(
        self, launches: Sequence[Launch], backoff: float, on_failure: Callable[[str], None]
    ) -> None:
        self.all = [Worker(launch, backoff) for launch in launches]
        for worker in self.all:
            task = asyncio.create_task(worker.run())
            task.add_done_callback(lambda task: self._ended(task, on_failure))
            self._tasks.append(task)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _ended(self, task: "asyncio.Task[None]", on_failure: Callable[[str], None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        on_failure(
            str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        )

    @property
    def ready(self) -> list[Worker]:
        return [worker for worker in self.all if worker.state == "ready"]

    @property
    def in_flight(self) -> int:
        return sum(worker.in_flight for worker in self.all)

    @property
    def restarts(self) -> int:
        return sum(worker.restarts for worker in self.all)

    @property
    def context(self) -> int:
        return min((worker.context for worker in self.all if worker.context), default=0)

    @property
    def state(self) -> str:
        if self.ready:
            return "ready"
        return "restarting" if any(worker.proven for worker in self.all) else "loading"

    @property
    def reason(self) -> str:
        loading = self.state == "loading"
        return (
            "the model is still loading"
            if loading
            else "the engine stopped and is being started again"
        )

    def pick(self, tried: Collection[Worker] = ()) -> Worker:
        ready = [worker for worker in self.ready if worker not in tried]
        if not ready:
            raise ApiError(503, f"{self.reason}: try again later", retry_after=2)
        return min(ready, key=lambda worker: worker.in_flight)

    async def ask(self, path: str) -> dict[Worker, httpx.Response]:
        """Of all that are ready and answer."""
        found = await asyncio.gather(*(one(worker, path) for worker in self.ready))
        return {
            worker: reply
            for worker, reply in found
            if reply is not None and reply.status_code == 200
        }

    def about(self) -> list[dict[str, Any]]:
        return [worker.about() for worker in self.all]


async def one(worker: Worker, path: str) -> tuple[Worker, httpx.Response | None]:
    try:
        return worker, await worker.get(path)
    except httpx.HTTPError:
        return worker, None
