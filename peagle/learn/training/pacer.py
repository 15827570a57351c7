"""Pacer: a job on a GPU uses only a share of the time while requests run.

After each piece of work the job sleeps as long as the share demands, or until the engines are idle.
Work on the CPU, such as compiling, is not limited: it does not slow the engines on the GPU.
"""

import math
import time
from collections.abc import Callable

from peagle.learn.engine_load import EngineLoad
from peagle.learn.folder import LearnFolder

POLL_SECONDS = 0.005
WARM_UP_PIECES = 3  # pieces of work after which code is compiled; there is no rest after them
MAX_FACTOR = 5.0  # a piece counts for so many times the shortest one at most: more is compiling


class Pacer:
    def __init__(
        self,
        folder: LearnFolder,
        share: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`share`: the fraction of time while requests run; 0 is without a limit."""
        self.folder = folder
        self.share = share
        self.clock = clock
        self.sleep = sleep
        self.begin()

    def begin(self) -> None:
        """Work of another kind begins now."""
        self.started = self.clock()
        self.pieces = 0
        self.shortest = math.inf

    def pause(self) -> None:
        """Sleep after a piece of work, which began at the end of the last pause."""
        spent = self.clock() - self.started
        self.pieces += 1
        self.shortest = min(self.shortest, spent)
        spent = min(spent, MAX_FACTOR * self.shortest) if self.pieces > WARM_UP_PIECES else 0.0
        rest_until = self.clock() + spent * (1 / self.share - 1) if self.share else 0.0
        while self.clock() < rest_until and is_busy(self.folder):
            self.sleep(min(POLL_SECONDS, max(rest_until - self.clock(), 0)))
        self.started = self.clock()


def is_busy(folder: LearnFolder) -> bool:
    return any(load.busy for load in EngineLoad.read_all(folder))
