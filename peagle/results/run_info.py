"""RunInfo: what identifies a benchmark run, and where and how it was measured."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from peagle.results.json_values import as_object, as_text

Section = Mapping[str, Any]  # a JSON object that is shown and compared key by key


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The order of the fields is their order in the file."""

    command: str | None = None
    pair: str | None = None
    target: Section = field(default_factory=dict)  # name, revision, dtype, sha
    engine: str | None = None  # native or endpoint
    endpoint: str | None = None  # its URL
    drafters: Section = field(default_factory=dict)  # by method
    environment: Section = field(default_factory=dict)  # versions, processor, GPU
    settings: Section = field(default_factory=dict)
    tasks: Section = field(default_factory=dict)  # a digest for each set

    @property
    def pair_name(self) -> str:
        return str(self.pair or self.target.get("name") or "unknown target")

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "RunInfo":
        return cls(
            command=as_text(raw.get("command")),
            pair=as_text(raw.get("pair")),
            target=as_object(raw.get("target")),
            engine=as_text(raw.get("engine")),
            endpoint=as_text(raw.get("endpoint")),
            drafters=as_object(raw.get("drafters")),
            environment=as_object(raw.get("environment")),
            settings=as_object(raw.get("settings")),
            tasks=as_object(raw.get("tasks")),
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
