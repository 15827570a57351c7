"""EngineSet: the engine processes of a server, one or `replicas`, and the trainer beside them."""

import asyncio
import shutil
from collections.abc import Callable

from peagle.server.engine_process.engine_supervisor import WORKER_MODULE, EngineSupervisor
from peagle.server.engine_process.learner_supervisor import LearnerSupervisor
from peagle.server.engine_process.replica_devices import device_environments, visible_gpus
from peagle.server.messages import ServerState, WorkerStatus
from peagle.server.settings import ServerSettings
from peagle.server.supervisor.detached import run_detached
from peagle.server.supervisor.process_supervisor import start_task
from peagle.server.supervisor.socket_folder import create_socket_folder


class EngineSet:
    def __init__(self, settings: ServerSettings, module: str = WORKER_MODULE) -> None:
        """`module`: what the processes run; tests have their own."""
        self.settings = settings
        self.module = module
        self.folder = create_socket_folder()
        self.engines: list[EngineSupervisor] = []
        self._on_state: Callable[[ServerState], None] = lambda state: None
        self._tasks: list[asyncio.Task[None]] = []

    def start_early(self) -> None:
        """Start a single engine process before there is an event loop."""
        if self.settings.replicas is None:
            self._create(["engine"], [{}])
            self.engines[0].start_early()

    def start(
        self, on_state: Callable[[ServerState], None], on_failure: Callable[[str], None]
    ) -> None:
        """Start all processes; `on_failure` is called if one of them can never be started."""
        self._on_state = on_state
        self._tasks = [start_task(self._start(on_failure), on_failure)]

    async def close(self) -> None:
        """End all processes, and wait until they are gone."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.remove_folder()

    def remove_folder(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def state(self) -> ServerState:
        return ServerState([engine.engine_state() for engine in self.engines])

    async def _start(self, on_failure: Callable[[str], None]) -> None:
        settings = self.settings
        if settings.replicas is not None:
            gpus = await run_detached(lambda: visible_gpus(settings.device))
            names = [f"replica-{i}" for i in range(settings.replicas)]
            self._create(names, device_environments(settings, gpus))
        elif not self.engines:
            self._create(["engine"], [{}])
        self._tasks += [start_task(engine.run(), on_failure) for engine in self.engines]
        if settings.learn is not None:
            learner = LearnerSupervisor(settings, self.folder, self._ready_status)
            self._tasks.append(start_task(learner.run_beside(), on_failure))

    def _ready_status(self) -> WorkerStatus | None:
        """The status of an engine that is ready; None: there is none."""
        ready = [engine.status_message for engine in self.engines if engine.state == "ready"]
        return next((status for status in ready if status.learn is not None), None)

    def _create(self, names: list[str], devices: list[dict[str, str]]) -> None:
        self.engines = [
            EngineSupervisor(self.settings, name, device, self.folder, self.module, self._changed)
            for name, device in zip(names, devices, strict=True)
        ]

    def _changed(self) -> None:
        self._on_state(self.state())
