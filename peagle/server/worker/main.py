"""An engine process: python -m peagle.server.worker.main ADDRESS SETTINGS (as JSON).

Its guard ends it when the server ends (supervisor/process_guard.py).
"""

import os
import sys
import time

from peagle.server.engines.engine_pool import EnginePool
from peagle.server.http.logs import set_up_logging
from peagle.server.settings import settings_from_json
from peagle.server.worker.engine_worker import EngineWorker

POLL_SECONDS = 0.2
REPORT_SECONDS = 2.0  # For the supervisor to read why the model cannot be served.
FAILED_EXIT_CODE = 1


def main(address: str, settings_json: str) -> None:
    set_up_logging()
    pool = EnginePool(settings_from_json(settings_json))
    worker = EngineWorker(pool, address)
    pool.start()
    while pool.driver.alive and worker.failure is None:
        time.sleep(POLL_SECONDS)
    if worker.failure is not None:
        time.sleep(REPORT_SECONDS)
    os._exit(FAILED_EXIT_CODE)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
