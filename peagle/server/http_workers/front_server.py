"""FrontServer: the web server of a front, which shares its listening socket with others."""

import asyncio
import socket
from typing import Any

from peagle.server.http.backend import Backend
from peagle.server.http_workers.shared_listener import SharedListener
from peagle.server.web_server import Server


class FrontServer(Server):
    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.listeners: list[SharedListener] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """A server that did not start leaves all connections to the others."""
        await super().startup([])
        if self.started:
            open_connections = self.server_state.connections
            self.listeners = [
                SharedListener(listener, self._create_protocol, open_connections)
                for listener in sockets or ()
            ]

    def _create_protocol(self) -> asyncio.Protocol:
        """As uvicorn does."""
        protocol_class: Any = self.config.http_protocol_class
        protocol: asyncio.Protocol = protocol_class(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in self.listeners:
            listener.close()
        await super().shutdown(sockets)
