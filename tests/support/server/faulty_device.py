"""`peagle serve` whose device is lost on demand: every call to it raises once FAULT exists.

    FAULT=FILE python -m tests.support.server.faulty_device serve PAIR ...

The engine process that detects the fault removes FILE, so that its successor has a working
device.
"""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from peagle.server import run
from peagle.server.engine_process.engine_set import EngineSet

MESSAGE = "CUDA error: unspecified launch failure"
is_lost = False


def fail_on_demand(owner: type, name: str) -> None:
    """Make this method raise from the time when the fault file exists."""
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


def run_worker(address: str, settings_json: str) -> None:
    from peagle.engine.kv.kv_cache import KVCache
    from peagle.engine.step.prefill import PrefillRunner
    from peagle.engine.step.stepper import Stepper
    from peagle.server.worker.main import main

    fail_on_demand(Stepper, "decode")
    fail_on_demand(PrefillRunner, "run")
    fail_on_demand(KVCache, "zero_pages")
    main(address, settings_json)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        from peagle.cli import app

        run.EngineSet = partial(EngineSet, module=__spec__.name)  # type: ignore[assignment,misc]
        app()
    else:
        run_worker(sys.argv[1], sys.argv[2])
