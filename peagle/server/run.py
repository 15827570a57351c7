"""`peagle serve`: opens the socket, starts the engine, and runs the web server, or several.

The engine process takes longest to start. It is started before web frameworks are imported here.
"""

import asyncio
import socket

from peagle.server.engine_process.engine_set import EngineSet
from peagle.server.http.logs import set_up_logging
from peagle.server.listener import open_listener
from peagle.server.settings import ServerSettings
from peagle.server.startup_checks import check_sources


def serve(settings: ServerSettings) -> None:
    """Run a server until it is stopped by a signal. UserError: the model cannot be served."""
    check_sources(settings)
    set_up_logging()
    listener = open_listener(settings)
    if settings.engine == "vllm":
        from peagle.server.vllm.gateway import Gateway
        from peagle.server.web_server import run_server

        run_server(Gateway(settings), listener)
        return
    engines = EngineSet(settings)
    engines.start_early()
    try:
        serve_engines(settings, engines, listener)
    finally:
        engines.remove_folder()


def serve_engines(settings: ServerSettings, engines: EngineSet, listener: socket.socket) -> None:
    if settings.http_workers > 1:
        from peagle.server.http_workers.front_set import FrontSet

        asyncio.run(FrontSet(settings, engines, listener).run())
        return
    from peagle.server.front.engine_client import EngineClient
    from peagle.server.routes import create_engine_backend
    from peagle.server.web_server import run_server

    run_server(create_engine_backend(settings, EngineClient(settings, engines)), listener)
