"""EngineSupervisor: one engine process (worker/main.py), replaced when it dies or hangs.

It reads the status of the process like a front does. A process that is ready and silent for longer
than `step_timeout` hangs in a step; before that, loading and compiling may take any time.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from peagle.server.engine_process.engine_link import EngineLink
from peagle.server.engines.status_counts import StatusCounts
from peagle.server.messages import (
    SUPERVISOR_IDENTITY,
    EngineState,
    WorkerBatch,
    WorkerStatus,
)
from peagle.server.settings import ServerSettings
from peagle.server.supervisor.child_process import ChildProcess
from peagle.server.supervisor.launch_spec import LaunchSpec, inherited_environment
from peagle.server.supervisor.process_supervisor import ProcessSupervisor

WORKER_MODULE = "peagle.server.worker.main"
ADDRESS_SCHEME = "ipc://"
MAX_FAILURES = 5  # Processes in a row that end without having completed an answer.
# Silence counted between two looks: this process may have been stopped for longer.
MAX_SILENCE_STEP = 1.0


class EngineSupervisor(ProcessSupervisor):
    max_failures = MAX_FAILURES

    def __init__(
        self,
        settings: ServerSettings,
        name: str,
        device: Mapping[str, str],
        folder: Path,
        module: str,
        on_change: Callable[[], None],
    ) -> None:
        """`device`: variables of its environment; `folder`: for its sockets; `module`: what the
        process runs; `on_change` is called when a process starts or ends."""
        super().__init__(name, settings.backoff)
        self.settings = settings
        self.address = ""
        self._settings_json = json.dumps(asdict(worker_settings(settings, device)))
        self._device = device
        self._folder = folder
        self._module = module
        self._on_change = on_change
        self._link: EngineLink | None = None
        self._early: ChildProcess | None = None  # Started before `run`.
        self._number = 0
        self._status = WorkerStatus()
        self._counts = StatusCounts()  # Of processes that have ended.
        self._failure: str | None = None
        self._silence = 0.0
        self._last_look = 0.0

    def engine_state(self) -> EngineState:
        counts = {name: dict(counter) for name, counter in self._counts.totals({}).items()}
        return EngineState(self.name, self.address, self._link is not None, self.restarts, counts)

    @property
    def status_message(self) -> WorkerStatus:
        """The last status of the process."""
        return self._status

    @property
    def pid(self) -> int | None:
        """The engine's own process, once it has reported; its guard is the parent."""
        return self._status.pid or super().pid

    def start_early(self) -> None:
        """Start the first process, before there is an event loop."""
        self._early = ChildProcess(self.launch_spec())

    def start_process(self) -> ChildProcess:
        process = self._early or ChildProcess(self.launch_spec())
        self._early = None
        self._link = EngineLink(self.address, self._receive, SUPERVISOR_IDENTITY)
        self._on_change()
        return process

    def launch_spec(self) -> LaunchSpec:
        socket = self._folder / f"{self.name}.{self._number}"
        self._number += 1
        self.address = f"{ADDRESS_SCHEME}{socket}"
        self._status = WorkerStatus()
        self._silence = 0.0
        return LaunchSpec(
            self.name,
            command=(sys.executable, "-m", self._module, self.address, self._settings_json),
            environment=inherited_environment() | dict(self._device),
            socket=socket,
        )

    def process_ended(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
            Path(self.address.removeprefix(ADDRESS_SCHEME)).unlink(missing_ok=True)
        self._counts.keep(self._status.counts)
        self._on_change()

    def has_proved(self) -> bool:
        """Whether the process has completed an answer, by its last status."""
        counts = self._status.counts.values()
        return any(c.get("finished:stop") or c.get("finished:length") for c in counts)

    def failure(self) -> str | None:
        return self._failure

    def replacement_reason(self) -> str | None:
        if self._failure is not None:
            return self._failure
        now = time.monotonic()
        self._silence += min(now - self._last_look, MAX_SILENCE_STEP)
        self._last_look = now
        limit = self.settings.step_timeout
        if self.state == "ready" and limit and self._silence > limit:
            return f"a step of the engine hangs for more than {limit:g} seconds"
        return None

    def _receive(self, batch: WorkerBatch) -> None:
        self._silence = 0.0
        if batch.status is None:
            return
        self._status = batch.status
        if batch.status.failure is not None:
            self._failure = batch.status.failure
        elif batch.status.target is not None and self.state == "starting":
            self.mark_ready()


def worker_settings(settings: ServerSettings, device: Mapping[str, str]) -> ServerSettings:
    """The settings of an engine process: no keys, and the only GPU that it sees."""
    return replace(
        settings,
        replicas=None,
        http_workers=1,
        api_keys=(),
        learn_opt_out=(),  # There may be keys among them; fronts check them.
        served_model_names=settings.model_names,
        device=settings.device.partition(":")[0] if device else settings.device,
    )
