"""RemoteSlot: an engine in another process, for a request that is prepared for it."""

from dataclasses import dataclass

from peagle.server.engine_process.engine_link import EngineLink
from peagle.server.front.engine_connection import EngineConnection
from peagle.server.messages import EngineInfo, EngineKey


@dataclass(slots=True, eq=False)
class RemoteSlot:
    key: EngineKey
    info: EngineInfo
    connection: EngineConnection
    link: EngineLink
    waited: float = 0.0  # Seconds that the request waited for the process.

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def context(self) -> int:
        return self.info.context

    @property
    def closed(self) -> bool:
        """Whether its process has ended."""
        return self.connection.link is not self.link

    def move_to(self, connection: EngineConnection) -> None:
        """Continue on another process, which builds the engine when it gets a request."""
        assert connection.link is not None
        self.connection = connection
        self.link = connection.link

    @property
    def k(self) -> int:
        """K of the last step, by the last status."""
        return int(self.connection.status.engines.get(self.name, {}).get("k", 0))

    def check_prompt(self, ids: list[int]) -> None:
        from peagle.engine.schedule.prompt_rules import PromptRules

        PromptRules(self.context, self.info.vocab_size).check(ids)
