"""Batches, prepared ahead in a thread: step after step, the same for the same seed whatever was run before."""

import queue
import threading
from collections.abc import Iterator
from itertools import islice

import numpy as np

from peagle.train.chains import most_rows, sample_chains
from peagle.train.config import TrainConfig
from peagle.train.documents import Documents, packed, steps
from peagle.train.pack import Batch, batch_of
from peagle.train.parallel import World

AHEAD = 4


class Feed:
    def __init__(self, documents: Documents, config: TrainConfig, world: World, device: str) -> None:
        self.documents, self.config, self.world, self.device = documents, config, world, device

    def __call__(self, first: int, last: int) -> Iterator[list[Batch]]:
        """This process's batches of the steps first..last - 1."""
        ready: queue.Queue = queue.Queue(AHEAD)
        over = threading.Event()

        def work() -> None:
            try:
                for step, packs in enumerate(islice(self._steps(), first, last), start=first):
                    _put(ready, self.batches(step, packs), over)
            except BaseException as error:  # handed to whoever waits for the batch
                _put(ready, error, over)

        threading.Thread(target=work, daemon=True).start()
        try:
            for _ in range(first, last):
                batches = ready.get()
                if isinstance(batches, BaseException):
                    raise batches
                yield batches
        finally:
            over.set()

    def batches(self, step: int, packs: list[np.ndarray]) -> list[Batch]:
        """Chains depend on the seed, the step and the pack's number alone."""
        out = []
        for number, chosen in enumerate(packs):
            if number % self.world.size == self.world.rank:
                out.append(self.batch(chosen, np.random.default_rng([self.config.seed, step, number])))
        return out

    def batch(self, chosen: np.ndarray, rng: np.random.Generator) -> Batch:
        config = self.config
        one = packed(self.documents, chosen, config.pack_tokens)
        chains = sample_chains(one.room, config.k, config.keep, rng, config.max_anchors)
        by_depth = config.method != "p-eagle"
        return batch_of(one, chains, by_depth, config.segments, self.device, self.capacity())

    def capacity(self) -> list[int] | None:
        """Fixed shapes where the number of anchors is capped and nothing is split."""
        config = self.config
        if not config.max_anchors or config.segments > 1:
            return None
        if config.method == "p-eagle":
            return [most_rows(config.max_anchors, config.k, config.keep)]
        depths = range(2, config.k + 1)
        return [
            most_rows(config.max_anchors, k, config.keep) - most_rows(config.max_anchors, k - 1, config.keep)
            for k in depths
        ]

    def keys(self, step: int) -> list[str]:
        """The documents of a step: what to look at when its loss is not a number."""
        packs = next(islice(self._steps(), step, None))
        return [self.documents.keys[i] for chosen in packs for i in chosen.tolist()]

    def steps_per_epoch(self) -> float:
        tokens = len(self.documents.ids) / self.config.pack_tokens
        return max(1.0, tokens / self.config.packs_per_step)

    def _steps(self) -> Iterator[list[np.ndarray]]:
        config = self.config
        return steps(self.documents, config.pack_tokens, config.packs_per_step, config.seed)


def _put(ready: queue.Queue, item: object, over: threading.Event) -> None:
    while not over.is_set():
        try:
            ready.put(item, timeout=0.2)
            break
        except queue.Full:
            continue
