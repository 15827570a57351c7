"""`peagle serve` whose engine processes a test controls (controlled_process.py)."""

from functools import partial

from peagle.server import run
from peagle.server.engine_process.engine_set import EngineSet

controlled = partial(EngineSet, module="tests.support.server.controlled_process")

if __name__ == "__main__":
    from peagle.cli import app

    run.EngineSet = controlled  # type: ignore[assignment,misc]
    app()
