"""Instance types and what their GPUs hold: data, in instances.toml."""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from peagle.deploy.spec import USABLE


@dataclass(frozen=True, slots=True)
class Instance:
    type: str
    gpus: int
    gb: int  # of each GPU

    @property
    def usable_gb(self) -> float:
        """What vLLM takes of all of them, unless told otherwise."""
        return self.gpus * self.gb * USABLE


@cache
def instances() -> dict[str, Instance]:
    families = tomllib.loads((Path(__file__).parent / "instances.toml").read_text())
    return {
        f"{family}.{size}": Instance(f"{family}.{size}", gpus, entry["gb"])
        for family, entry in families.items()
        for size, gpus in entry["gpus"].items()
    }


def smallest(need_gb: float) -> str | None:
    """The type with the least memory that holds so much; None: no type we know does."""
    enough = [one for one in instances().values() if one.usable_gb >= need_gb]
    return min(enough, key=lambda one: one.usable_gb).type if enough else None
