"""LearnerSupervisor: the trainer of `peagle serve --learn`, a process of its own.

It is started when an engine process is ready and learns. Its end never touches serving: it is
started again, after a longer and longer time, unless its settings are wrong.
"""

import asyncio
import logging
import sys
from collections.abc import Callable
from pathlib import Path

from peagle.errors import UserError
from peagle.learn.settings import LearnerSettings
from peagle.server.http.logs import log_event
from peagle.server.messages import WorkerStatus
from peagle.server.settings import ServerSettings
from peagle.server.supervisor.launch_spec import LaunchSpec, inherited_environment
from peagle.server.supervisor.process_supervisor import (
    USAGE_ERROR,
    ProcessSupervisor,
    describe_failure,
)

LEARNER_MODULE = "peagle.learn.process"
POLL_SECONDS = 0.2


class LearnerSupervisor(ProcessSupervisor):
    def __init__(
        self,
        settings: ServerSettings,
        folder: Path,
        find_status: Callable[[], WorkerStatus | None],
    ) -> None:
        """`folder`: of this server's sockets. `find_status`: that of an engine that is ready."""
        super().__init__("learner", settings.backoff)
        self.settings = settings
        self._folder = folder
        self._find_status = find_status
        self._settings_json = ""

    async def prepare(self) -> None:
        """Wait for an engine. UserError: it does not learn, and has logged why."""
        while (status := self._find_status()) is None:
            await asyncio.sleep(POLL_SECONDS)
        assert status.learn is not None and status.target is not None
        if status.learn.failure is not None:
            raise UserError(status.learn.failure)
        self._settings_json = learner_settings(self.settings, status).to_json()

    def launch_spec(self) -> LaunchSpec:
        assert self.settings.learn is not None
        return LaunchSpec(
            self.name,
            command=(
                *(sys.executable, "-m", LEARNER_MODULE),
                *(self.settings.learn, self._settings_json),
            ),
            environment=inherited_environment(),
            socket=self._folder / self.name,
        )

    async def monitor(self) -> None:
        self.mark_ready()

    def failure(self) -> str | None:
        """A usage error would come again, such as a folder of another target."""
        if self.process is None or self.process.exit_code != USAGE_ERROR:
            return None
        return describe_failure(self.process, "cannot be started")

    async def run_beside(self) -> None:
        """Run until this is canceled; without a trainer, the server goes on."""
        try:
            await self.run()
        except UserError as error:
            log_event("the trainer is off", logging.ERROR, reason=str(error))
        except Exception as error:
            log_event("the trainer is off", logging.ERROR, error, reason=str(error))


def learner_settings(settings: ServerSettings, status: WorkerStatus) -> LearnerSettings:
    """The trainer's settings, for the pair as the engine process has loaded it."""
    assert status.target is not None and status.learn is not None
    return LearnerSettings(
        pair=settings.pair,
        target=settings.target,
        drafter=status.learn.drafter,
        device=settings.device,
        context=settings.context,
        method=status.target.key.method,
        time_share=settings.learn_time,
        memory_gib=settings.learn_memory,
        replay=settings.learn_replay,
    )
