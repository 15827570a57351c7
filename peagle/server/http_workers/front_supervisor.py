"""FrontSupervisor: one front process. Another takes its place when it dies."""

import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from peagle.server.http_workers.front_process import SPEC_VARIABLE, FrontSpec
from peagle.server.supervisor.launch_spec import LaunchSpec
from peagle.server.supervisor.process_supervisor import (
    USAGE_ERROR,
    ProcessSupervisor,
    describe_failure,
)

MODULE = "peagle.server.http_workers.front_process"
MAX_FAILURES = 5  # Fronts in a row that end within PROVED_SECONDS.
PROVED_SECONDS = 10.0
READY_WAIT_SECONDS = 30.0


class FrontSupervisor(ProcessSupervisor):
    max_failures = MAX_FAILURES

    def __init__(
        self, name: str, spec: FrontSpec, environment: Mapping[str, str], folder: Path
    ) -> None:
        super().__init__(name, spec.settings.backoff)
        self._spec = spec
        self._environment = environment
        self._folder = folder

    def launch_spec(self) -> LaunchSpec:
        spec = self._spec
        if self.was_ready:  # The other fronts answer until this one can.
            spec = replace(spec, ready_wait=READY_WAIT_SECONDS)
        return LaunchSpec(
            self.name,
            command=(sys.executable, "-m", MODULE),
            environment={**self._environment, SPEC_VARIABLE: spec.to_json()},
            socket=self._folder / self.name,
            inherited_files=(spec.listener,),
        )

    async def monitor(self) -> None:
        self.mark_ready()  # It may take connections from now on.

    def has_proved(self) -> bool:
        return time.monotonic() - self.ready_at > PROVED_SECONDS

    def failure(self) -> str | None:
        """A usage error would come again, such as a target without a tokenizer."""
        if self.process is None or self.process.exit_code != USAGE_ERROR:
            return None
        return describe_failure(self.process, "cannot be started")
