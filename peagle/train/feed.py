"""Batches, prepared ahead: step after step, the same for the same seed whatever was run before."""

from collections.abc import Iterator
from itertools import islice

import numpy as np
from torch.utils.data import DataLoader, Dataset

from peagle.train.config import TrainConfig
from peagle.train.data.batch_transfer import FlatBatch, flatten
from peagle.train.data.chains import most_rows, sample_chains
from peagle.train.data.documents import Documents, epoch_order, packed, steps
from peagle.train.data.pack import Batch, batch_of
from peagle.train.optim.parallel import World

WORKERS, AHEAD = 4, 4  # beside a GPU: processes, batches each


class Feed(Dataset[list[FlatBatch]]):
    """Item i: this process's batches of step `first` + i, not on the device yet."""

    def __init__(
        self, documents: Documents, config: TrainConfig, world: World, device: str
    ) -> None:
        self.documents, self.config, self.world, self.device = documents, config, world, device
        self.flex = device.startswith("cuda")
        self.first = 0
        self.packs: list[list[np.ndarray]] = []

    def __call__(self, first: int, last: int) -> Iterator[list[Batch]]:
        """The batches of the steps first..last - 1, on the device."""
        self.first, self.packs = first, list(islice(self._steps(), first, last))
        ahead = {"num_workers": WORKERS, "prefetch_factor": AHEAD} if self.flex else {}
        for batches in DataLoader(self, batch_size=None, shuffle=False, collate_fn=_same, **ahead):  # type: ignore
            yield [batch.to(self.device) for batch in batches]

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, i: int) -> list[FlatBatch]:
        """Chains depend on the seed, the step and the pack's number alone."""
        out = []
        for number, chosen in enumerate(self.packs[i]):
            if number % self.world.size == self.world.rank:
                rng = np.random.default_rng([self.config.seed, self.first + i, number])
                out.append(flatten(self.batch(chosen, rng)))
        return out

    def batch(self, chosen: np.ndarray, rng: np.random.Generator) -> Batch:
        config = self.config
        one = packed(self.documents, chosen, config.pack_tokens)
        chains = sample_chains(one.room, config.k, config.keep, rng, config.max_anchors)
        if config.dependency:
            chains = chains.dropped(config.dependency_drop, rng)
        by_depth = config.method != "p-eagle"
        return batch_of(
            one, chains, by_depth, config.segments, self.capacity(), self.flex, config.bidirectional
        )

    def capacity(self) -> list[int] | None:
        """Fixed shapes where the number of anchors is capped and nothing is split."""
        config = self.config
        if not config.max_anchors or config.segments > 1:
            return None
        if config.method == "p-eagle":
            return [most_rows(config.max_anchors, config.k, config.keep)]
        depths = range(2, config.k + 1)
        return [
            most_rows(config.max_anchors, k, config.keep)
            - most_rows(config.max_anchors, k - 1, config.keep)
            for k in depths
        ]

    def keys(self, step: int) -> list[str]:
        """The documents of a step: what to look at when its loss is not a number."""
        packs = next(islice(self._steps(), step, None))
        return [self.documents.keys[i] for chosen in packs for i in chosen.tolist()]

    def steps_per_epoch(self) -> float:
        packs = epoch_order(self.documents, self.config.pack_tokens, self.config.seed, 0)
        return len(packs) / self.config.packs_per_step

    def _steps(self) -> Iterator[list[np.ndarray]]:
        config = self.config
        return steps(self.documents, config.pack_tokens, config.packs_per_step, config.seed)


def _same(batches: list[FlatBatch]) -> list[FlatBatch]:
    return batches
