"""A front: a web server process that shares a listening socket and the engine processes.

    python -m peagle.server.http_workers.front_process

It gets a FrontSpec in its environment, which other users cannot read: there are API keys in it.
"""

import json
import logging
import os
import socket
import sys
from dataclasses import asdict, dataclass

from peagle.errors import UserError
from peagle.server.front.engine_client import EngineClient
from peagle.server.http.logs import log_event, set_up_logging
from peagle.server.http_workers.front_server import FrontServer
from peagle.server.http_workers.metrics_files import allocate_metrics_files
from peagle.server.http_workers.state_channel import StateSubscription
from peagle.server.routes import create_engine_backend
from peagle.server.settings import ServerSettings, settings_from_json
from peagle.server.supervisor.process_supervisor import USAGE_ERROR

SPEC_VARIABLE = "PEAGLE_FRONT"
NO_SPACE_EXIT_CODE = 1  # Another attempt may find some.


@dataclass(frozen=True, slots=True)
class FrontSpec:
    settings: ServerSettings
    listener: int  # descriptor
    state_address: str
    # Seconds to wait for the engines before connections are accepted: other fronts take them.
    ready_wait: float = 0.0

    def to_json(self) -> str:
        settings = json.dumps(asdict(self.settings))
        return json.dumps([settings, self.listener, self.state_address, self.ready_wait])


def read_spec(text: str) -> FrontSpec:
    settings, listener, state_address, ready_wait = json.loads(text)
    return FrontSpec(settings_from_json(settings), listener, state_address, ready_wait)


def main() -> int:
    set_up_logging()
    spec = read_spec(os.environ.pop(SPEC_VARIABLE))
    try:
        allocate_metrics_files()
    except UserError as error:
        log_event("failed", logging.ERROR, reason=str(error))
        return NO_SPACE_EXIT_CODE
    client = EngineClient(spec.settings, StateSubscription(spec.state_address))
    server = FrontServer(create_engine_backend(spec.settings, client, spec.ready_wait))
    log_event("front started", pid=os.getpid())
    server.run(sockets=[socket.socket(fileno=spec.listener)])
    return 0 if server.failure is None else USAGE_ERROR


if __name__ == "__main__":
    sys.exit(main())
