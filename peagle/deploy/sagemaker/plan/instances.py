"""Instance types and the memory of their GPUs, from instances.toml."""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from peagle.deploy.spec import GPU_MEMORY_UTILIZATION


@dataclass(frozen=True, slots=True)
class InstanceType:
    name: str
    gpus: int
    gpu_gb: int  # memory of each GPU

    @property
    def usable_gb(self) -> float:
        """GPU memory that vLLM uses by default, over all GPUs."""
        return self.gpus * self.gpu_gb * GPU_MEMORY_UTILIZATION


@cache
def instance_types() -> dict[str, InstanceType]:
    families = tomllib.loads((Path(__file__).parent / "instances.toml").read_text())
    return {
        f"{family}.{size}": InstanceType(f"{family}.{size}", gpus, entry["gb"])
        for family, entry in families.items()
        for size, gpus in entry["gpus"].items()
    }


def smallest_instance(need_gb: float) -> str | None:
    """The type with the least GPU memory that is sufficient; None if no known type is."""
    sufficient = [entry for entry in instance_types().values() if entry.usable_gb >= need_gb]
    return min(sufficient, key=lambda entry: entry.usable_gb).name if sufficient else None
