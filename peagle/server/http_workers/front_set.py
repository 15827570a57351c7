"""FrontSet: a server with several fronts, which share the engine processes and one socket.

    supervisor (this process) -> N fronts: the listening socket, and which engines run
    front <-> engine process: requests and tokens, without the supervisor

The first signal drains all fronts: they finish their answers and end, then the engines end.
"""

import asyncio
import secrets
import signal
import socket

from peagle.errors import UserError
from peagle.server.engine_process.engine_set import EngineSet
from peagle.server.http.cache_salt import SECRET_VARIABLE
from peagle.server.http.drain import SECOND_SIGNAL
from peagle.server.http.logs import log_event
from peagle.server.http_workers.front_process import FrontSpec
from peagle.server.http_workers.front_supervisor import FrontSupervisor
from peagle.server.http_workers.metrics_files import FOLDER_VARIABLE
from peagle.server.http_workers.state_channel import StatePublisher
from peagle.server.responses.shared_response_store import PATH_VARIABLE
from peagle.server.settings import ServerSettings
from peagle.server.supervisor.launch_spec import inherited_environment
from peagle.server.supervisor.process_supervisor import start_task

# Seconds that a front may need in addition to its drain.
EXIT_SECONDS = 8.0


class FrontSet:
    def __init__(
        self, settings: ServerSettings, engines: EngineSet, listener: socket.socket
    ) -> None:
        self.settings = settings
        self.engines = engines
        self.failure: str | None = None
        self._listener = listener
        self._stop = asyncio.Event()
        self._kill = asyncio.Event()

    async def run(self) -> None:
        """Run until a signal stops the server. UserError: the model cannot be served."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        address = f"ipc://{self.engines.folder}/state"
        publisher = StatePublisher(address, self.engines.state)
        fronts = self._create_fronts(address)
        tasks = [start_task(front.run(), self._fail) for front in fronts]
        self.engines.start(lambda state: publisher.publish(), self._fail)
        try:
            await self._stop.wait()
            if self.failure is None:
                await self._drain(fronts, tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.engines.close()
            publisher.close()
        if self.failure is not None:
            raise UserError(self.failure)
        log_event("stopped")

    def _create_fronts(self, address: str) -> list[FrontSupervisor]:
        folder = self.engines.folder
        metrics = folder / "metrics"
        metrics.mkdir()
        environment = inherited_environment() | {
            FOLDER_VARIABLE: str(metrics),
            SECRET_VARIABLE: secrets.token_hex(32),
            PATH_VARIABLE: str(folder / "responses"),
        }
        spec = FrontSpec(self.settings, self._listener.fileno(), address)
        count = self.settings.http_workers
        return [FrontSupervisor(f"front-{i}", spec, environment, folder) for i in range(count)]

    async def _drain(
        self, fronts: list[FrontSupervisor], tasks: "list[asyncio.Task[None]]"
    ) -> None:
        for front in fronts:
            front.finish()
        killed = asyncio.ensure_future(self._kill.wait())
        ended = asyncio.ensure_future(asyncio.wait(tasks))
        seconds = self.settings.drain_seconds + EXIT_SECONDS
        await asyncio.wait({killed, ended}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        killed.cancel()

    def _on_signal(self, number: int) -> None:
        """Drain at the first signal; exit at once at the second."""
        if self._stop.is_set():
            self._kill.set()
            return
        log_event(
            "draining",
            signal=number,
            seconds=self.settings.drain_seconds,
            second_signal=SECOND_SIGNAL,
        )
        self._stop.set()

    def _fail(self, reason: str) -> None:
        if self.failure is None and not self._stop.is_set():
            self.failure = reason
            self._stop.set()
