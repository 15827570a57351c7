"""Engines of the fast and of exact mode under a constant load, for price.py and steps.py."""

import statistics
import time
from dataclasses import dataclass
from typing import Any

from peagle.engine import Engine, EngineConfig
from peagle.engine.step.step_output import StepRecord
from peagle.engine.stream import Stream
from peagle.loaded import LoadedPair

CONTEXT = 1024
SHAPE_PROMPT = 128  # tokens of a random prompt


@dataclass(frozen=True)
class Drafting:
    """What an engine drafts."""

    method: str
    k: int | str = 1
    tree: int = 0

    @property
    def name(self) -> str:
        if self.method == "none":
            return "none"
        return f"{self.method} K={self.k}" + (f" tree {self.tree}" if self.tree else "")


NONE = Drafting("none")
DRAFTINGS = (
    NONE,
    Drafting("p-eagle", 7),
    Drafting("p-eagle", 11),
    Drafting("p-eagle", 11, 31),
    Drafting("p-eagle", "auto", 31),
)


@dataclass(frozen=True)
class Asked:
    ids: list[int]
    options: dict[str, Any]


def engine_of(pair: LoadedPair, drafting: Drafting, exact: bool, **options: Any) -> Engine:
    config: dict[str, Any] = {"max_batch": 64, "context": CONTEXT, "thread": False} | options
    return Engine(
        pair,
        EngineConfig(
            method=drafting.method, k=drafting.k, tree=drafting.tree, exact=exact, **config
        ),
    )


@dataclass(frozen=True)
class Speed:
    tokens_per_second: float
    length: float  # tokens per step of a request
    step_ms: float  # the median step with as many requests as run at a time
    nodes: int  # of the draft of most of these steps


def measure(engine: Engine, asked: list[Asked], concurrency: int) -> Speed:
    """With always so many requests, until too few are left."""
    waiting = list(reversed(asked))
    streams: list[Stream] = []
    steps: list[StepRecord] = []
    engine.on_step(steps.append)
    started = time.perf_counter()
    while waiting or engine.busy:
        while waiting and engine.live_requests < concurrency:
            request = waiting.pop()
            streams.append(engine.add(request.ids, **request.options))
        engine.step()
    seconds = time.perf_counter() - started
    engine.on_step(None)
    counts = [len(piece.step.tokens) for stream in streams for piece in stream if piece.step]
    largest = max(step.batch for step in steps)
    full = [step for step in steps if step.batch == largest]
    return Speed(
        sum(counts) / seconds,
        sum(counts) / len(counts),
        1000 * statistics.median(step.seconds for step in full),
        statistics.mode(step.shape.nodes for step in full),
    )
