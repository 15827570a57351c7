"""`peagle serve` whose device is lost on demand: every call to it raises once FAULT exists.

    FAULT=FILE python -m tests.support.faulty_device serve PAIR ...

With --replicas, the replicas run like this too. The process that meets the fault removes FILE, so
that the one that replaces it has a working device.
"""

import os
import sys
from pathlib import Path
from typing import Any

from peagle.engine.kv.kv_cache import KVCache
from peagle.engine.step.prefill import PrefillRunner
from peagle.engine.step.stepper import Stepper
from peagle.server.workers import replicas
from peagle.server.workers.launch_spec import LaunchSpec

MESSAGE = "CUDA error: unspecified launch failure"
is_lost = False


def fail_on_demand(owner: type, name: str) -> None:
    """Make this method raise once the fault file exists, and ever after."""
    method = getattr(owner, name)
    fault = Path(os.environ["FAULT"])

    def call(*args: Any, **kwargs: Any) -> Any:
        global is_lost
        if is_lost or fault.exists():
            is_lost = True
            fault.unlink(missing_ok=True)
            raise RuntimeError(MESSAGE)
        return method(*args, **kwargs)

    setattr(owner, name, call)


def launch_faulty(*args: Any, **kwargs: Any) -> LaunchSpec:
    command = tuple(
        __spec__.name if "replica_process" in word else word for word in kwargs["command"]
    )
    return LaunchSpec(*args, **kwargs | {"command": command})


def main() -> None:
    fail_on_demand(Stepper, "decode")
    fail_on_demand(PrefillRunner, "run")
    fail_on_demand(KVCache, "zero_pages")
    if sys.argv[1] == "serve":
        from peagle.cli import app

        replicas.LaunchSpec = launch_faulty  # type: ignore[assignment,misc]
        app()
    else:
        from peagle.server.replica_process import main as run_replica

        run_replica(sys.argv[1])


if __name__ == "__main__":
    main()
