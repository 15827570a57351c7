"""StateSource: where a front learns which engine processes there are."""

from collections.abc import Callable
from typing import Protocol

from peagle.server.messages import ServerState


class StateSource(Protocol):
    """Says which engine processes there are: their supervisors, or a channel to those."""

    def start(
        self, on_state: Callable[[ServerState], None], on_failure: Callable[[str], None]
    ) -> None: ...

    async def close(self) -> None: ...
