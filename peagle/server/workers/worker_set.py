"""The workers of a server. A request goes to the ready worker with the fewest in flight."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Any

import httpx

from peagle.errors import UserError
from peagle.server.http.errors import ApiError
from peagle.server.workers.launch_spec import LaunchSpec
from peagle.server.workers.worker import Worker


class WorkerSet:
    def __init__(self) -> None:
        self.all: list[Worker] = []
        self._tasks: list[asyncio.Task[None]] = []

    def start(
        self, specs: Sequence[LaunchSpec], backoff: float, on_failure: Callable[[str], None]
    ) -> None:
        """Start all workers; `on_failure` is called if one of them can never be started."""
        self.all = [Worker(spec, backoff) for spec in specs]
        for worker in self.all:
            task = asyncio.create_task(worker.run())
            task.add_done_callback(lambda task: report_failure(task, on_failure))
            self._tasks.append(task)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

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
        return "restarting" if any(worker.was_ready for worker in self.all) else "loading"

    @property
    def unavailable_reason(self) -> str:
        if self.state == "loading":
            return "the model is still loading"
        return "the engine stopped and is being started again"

    def pick(self, excluded: Collection[Worker] = ()) -> Worker:
        ready = [worker for worker in self.ready if worker not in excluded]
        if not ready:
            raise ApiError(503, f"{self.unavailable_reason}: try again later", retry_after=2)
        return min(ready, key=lambda worker: worker.in_flight)

    async def get_all(self, path: str) -> dict[Worker, httpx.Response]:
        """Return the successful responses of the ready workers."""
        workers = self.ready
        responses = await asyncio.gather(*(try_get(worker, path) for worker in workers))
        return {
            worker: response
            for worker, response in zip(workers, responses, strict=True)
            if response is not None and response.status_code == 200
        }

    def status(self) -> list[dict[str, Any]]:
        return [worker.status() for worker in self.all]


def report_failure(task: "asyncio.Task[None]", on_failure: Callable[[str], None]) -> None:
    if task.cancelled() or (error := task.exception()) is None:
        return
    on_failure(str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}")


async def try_get(worker: Worker, path: str) -> httpx.Response | None:
    try:
        return await worker.get(path)
    except httpx.HTTPError:
        return None
