"""What /metrics and /v1/peagle/status show of the engine processes."""

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from peagle.server.engines.status_counts import StatusCounts
from peagle.server.front.engine_client import EngineClient
from peagle.server.front.engine_connection import EngineConnection
from peagle.server.front.engine_status import sum_statuses
from peagle.server.messages import LearnReport


class EngineCounts:
    """With several processes, the name of an engine is followed by its process's."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client

    @property
    def connections(self) -> list[EngineConnection]:
        return list(self.client.pool.connections.values())

    def _label(self, engine: str, connection: EngineConnection) -> str:
        return engine if len(self.connections) == 1 else f"{engine} {connection.name}"

    @property
    def is_up(self) -> bool:
        return self.client.state == "ready"

    @property
    def restarts(self) -> int:
        return sum(connection.state.restarts for connection in self.connections)

    @property
    def scorings(self) -> int:
        return sum(connection.status.scorings for connection in self.connections)

    @property
    def silence(self) -> float:
        """Seconds since the last message of the process that has been silent for the longest."""
        heard = [connection.last_heard for connection in self.connections if connection.ready]
        return time.monotonic() - min(heard) if heard else 0.0

    def learn_reports(self) -> dict[str, LearnReport]:
        """By process: what it reports on learning; {}: the server does not learn."""
        return {
            connection.name: connection.status.learn
            for connection in self.connections
            if connection.status.learn is not None
        }

    def statuses(self) -> dict[str, Mapping[str, Any]]:
        """By label: the status of each engine of each process."""
        return {
            self._label(name, connection): status
            for connection in self.connections
            for name, status in connection.status.engines.items()
        }

    def summed(self) -> Mapping[str, Mapping[str, Any]]:
        """By engine name: the sum over the processes."""
        statuses = [connection.status.engines for connection in self.connections]
        return statuses[0] if len(statuses) == 1 else sum_statuses(statuses)

    def counts(self) -> dict[str, Counter[str]]:
        """By label: the counters of all processes, ended ones included."""
        counts: dict[str, Counter[str]] = {}
        for connection in self.connections:
            totals = StatusCounts()
            totals.keep(connection.state.counts)
            for name, counter in totals.totals(connection.status.counts).items():
                counts[self._label(name, connection)] = counter
        return counts
