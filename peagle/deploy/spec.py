"""Deployment: everything that decides how a pair is served, whatever it runs on. Templates only write it down."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from peagle.core import Method
from peagle.errors import UserError

IMAGE = "vllm/vllm-openai"
DRAFTER_MOUNT = "/models/drafter"
TARGET_MOUNT = "/models/target"
LABEL = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
USABLE = 0.9  # vLLM's --gpu-memory-utilization


@dataclass(frozen=True, slots=True)
class Deployment:
    pair: str
    target: str  # a hub id, or TARGET_MOUNT
    drafter: str  # a hub id, or DRAFTER_MOUNT
    method: Method
    k: int
    vllm: str
    local_drafter: bool = False  # exported to `drafter/` beside the files, mounted as DRAFTER_MOUNT
    target_folder: str | None = None  # on this machine, mounted as TARGET_MOUNT
    context: int | None = None
    gpus: int = 1  # of a replica: tensor parallel
    gpu: str | None = None  # their type
    replicas: int = 1
    port: int = 8000
    name: str = ""
    served_name: str = ""
    image_name: str | None = None  # instead of IMAGE at the version
    flags: Mapping[str, Any] = field(default_factory=dict)
    weights_gb: float | None = None
    need_gb: float | None = None  # of all GPUs of a replica, for one request of the full context
    notes: tuple[str, ...] = ()  # what whoever deploys this should know

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or f"peagle-{dns_label(self.pair)}")
        object.__setattr__(self, "served_name", self.served_name or self.pair)
        rules = {
            "--gpus must be 1 or more": self.gpus >= 1,
            "--replicas must be 1 or more": self.replicas >= 1,
            "--port must be in 1024..65535": 1024 <= self.port <= 65535,
            "--context must be 2 or more": self.context is None or self.context >= 2,
            "--gpu must be the name of a type": re.fullmatch(r"[\w.-]*", self.gpu or ""),
            "--name must be a-z, 0-9 and dashes, at most 40": LABEL.fullmatch(self.name),
            # Kubernetes turns a Service `vllm` into VLLM_PORT and the like, which vLLM reads as its own settings
            "--name must not be or begin with vllm: its settings would clash": not self.name.startswith(
                "vllm"
            ),
        }
        for rule, holds in rules.items():
            if not holds:
                raise UserError(
                    f"{rule}; it is {getattr(self, rule.split()[0].removeprefix('--'))!r}"
                )
        if not re.fullmatch(r"\S+", self.served_name):
            raise UserError(
                f"{self.served_name!r} is no name for requests: give --served-model-name without spaces"
            )
        if not re.fullmatch(r"[\w.:/@-]+:[\w.-]+", self.image):
            raise UserError(f"--image {self.image!r} names no version: give NAME:TAG")
        words = (self.pair, self.served_name, self.target, self.drafter, self.target_folder or "")
        if strange := [word for word in words if not word.isprintable()]:
            raise UserError(f"{strange[0]!r} holds control characters: rename it")

    @property
    def image(self) -> str:
        return self.image_name or f"{IMAGE}:v{self.vllm}"

    @property
    def local(self) -> bool:
        """Is there anything to be mounted?"""
        return self.local_drafter or self.target_folder is not None

    @property
    def speculative(self) -> dict[str, Any]:
        """All four keys: without `method` vLLM guesses from the path, without the last it drafts one by one."""
        return {
            "method": "eagle3",
            "model": self.drafter,
            "num_speculative_tokens": self.k,
            "parallel_drafting": self.method == "p-eagle",
        }

    @property
    def options(self) -> dict[str, Any]:
        """Of `vllm serve TARGET`, without host and port; True is a bare flag."""
        found: dict[str, Any] = {
            "served-model-name": self.served_name,
            "tensor-parallel-size": self.gpus,
        }
        if self.context is not None:
            found["max-model-len"] = self.context
        return {**found, **self.flags, "speculative-config": self.speculative}

    @property
    def arguments(self) -> list[str]:
        """What stands behind `vllm serve`, word by word."""
        return [self.target, "--host=0.0.0.0", f"--port={self.port}", *self.option_words]

    @property
    def option_words(self) -> list[str]:
        return [word_of(name, value) for name, value in self.options.items()]

    @property
    def extra_words(self) -> list[str]:
        """The options for which charts have no field of their own."""
        fields = ("tensor-parallel-size", "max-model-len")
        return [word_of(name, value) for name, value in self.options.items() if name not in fields]

    @property
    def engine_flags(self) -> dict[str, Any]:
        """The pair's own options as the engine's keywords: `no-x` is x = False."""
        return {
            name.removeprefix("no-").replace("-", "_"): False if name.startswith("no-") else value
            for name, value in self.flags.items()
        }

    @property
    def environment(self) -> dict[str, str]:
        """P-EAGLE runs on vLLM's first model runner only."""
        runner = {"VLLM_USE_V2_MODEL_RUNNER": "0"} if self.method == "p-eagle" else {}
        return runner | {"VLLM_NO_USAGE_STATS": "1"}

    @property
    def disk_gb(self) -> int:
        """Weights, drafter and compiled kernels, with room to spare."""
        return 200 if self.weights_gb is None else 20 + math.ceil(1.5 * self.weights_gb)

    @property
    def host_gb(self) -> int:
        return 64 if self.weights_gb is None else max(16, math.ceil(1.25 * self.weights_gb))

    @property
    def gpu_gb(self) -> int | None:
        """What each GPU must have at least; None: unknown."""
        need = self.need_gb or self.weights_gb
        return None if need is None else math.ceil(need / USABLE / self.gpus)


def word_of(name: str, value: Any) -> str:
    if value is True:
        return f"--{name}"
    return f"--{name}={value if isinstance(value, str) else json.dumps(value)}"


def dns_label(word: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", word.lower()).strip("-")[:30].strip("-")
