"""The batches of every step, prepared ahead; they depend on the seed, not on earlier steps."""

from collections.abc import Iterator
from itertools import islice, pairwise

import numpy as np
from torch.utils.data import DataLoader, Dataset

from peagle.train.config import TrainConfig
from peagle.train.data.batch_transfer import FlatBatch, flatten
from peagle.train.data.chains import max_chain_rows, sample_chains
from peagle.train.data.documents import Documents, epoch_packs, iterate_steps, pack_documents
from peagle.train.data.pack import Batch, BatchLayout, build_batch
from peagle.train.optim.parallel import World

NUM_WORKERS = 4  # processes that prepare batches for a GPU
PREFETCH_FACTOR = 4  # steps that each of them prepares ahead


class StepDataset(Dataset[list[FlatBatch]]):
    """Item i holds this process's batches of step `first_step` + i, on the host."""

    def __init__(
        self, documents: Documents, config: TrainConfig, world: World, device: str
    ) -> None:
        self.documents = documents
        self.config = config
        self.world = world
        self.device = device
        self.layout = BatchLayout(
            by_depth=config.method != "p-eagle",
            segments=config.segments,
            level_sizes=level_sizes(config),
            flex=device.startswith("cuda"),
            bidirectional=config.bidirectional,
            window=config.window,
            refinement=config.refinement > 0,
        )
        self.first_step = 0
        self.packs: list[list[np.ndarray]] = []  # the document indices of the packs of each step

    def load(self, first_step: int, last_step: int) -> Iterator[list[Batch]]:
        """The batches of the steps first_step..last_step - 1, on the device."""
        self.first_step = first_step
        self.packs = list(islice(self._steps(), first_step, last_step))
        workers = (
            {"num_workers": NUM_WORKERS, "prefetch_factor": PREFETCH_FACTOR}
            if self.layout.flex
            else {}
        )
        loader: DataLoader[list[FlatBatch]] = DataLoader(
            self,
            batch_size=None,
            shuffle=False,
            collate_fn=_identity,
            **workers,  # type: ignore[arg-type]
        )
        for batches in loader:
            yield [batch.to(self.device) for batch in batches]

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, i: int) -> list[FlatBatch]:
        """The chains of a pack depend on the seed, the step and the pack's number alone."""
        batches = []
        for number, chosen in enumerate(self.packs[i]):
            if number % self.world.size == self.world.rank:
                rng = np.random.default_rng([self.config.seed, self.first_step + i, number])
                batches.append(flatten(self._build_batch(chosen, rng)))
        return batches

    def _build_batch(self, chosen: np.ndarray, rng: np.random.Generator) -> Batch:
        config = self.config
        packed = pack_documents(self.documents, chosen, config.pack_tokens)
        chains = sample_chains(
            packed.max_chain_lengths, config.k, config.keep, rng, config.max_anchors
        )
        if config.dependency:
            chains = chains.drop_corrections(config.dependency_drop, rng)
        return build_batch(packed, chains, self.layout)

    def document_keys(self, step: int) -> list[str]:
        """The keys of the documents of a step, to examine when its loss is not a number."""
        packs = next(islice(self._steps(), step, None))
        return [self.documents.keys[i] for chosen in packs for i in chosen.tolist()]

    def steps_per_epoch(self) -> float:
        packs = epoch_packs(self.documents, self.config.pack_tokens, self.config.seed, 0)
        return len(packs) / self.config.packs_per_step

    def _steps(self) -> Iterator[list[np.ndarray]]:
        config = self.config
        return iterate_steps(self.documents, config.pack_tokens, config.packs_per_step, config.seed)


def level_sizes(config: TrainConfig) -> tuple[int, ...] | None:
    """Fixed sizes of the chain levels, for a limited number of anchors and one segment."""
    if not config.max_anchors or config.segments > 1:
        return None
    rows = [max_chain_rows(config.max_anchors, k, config.keep) for k in range(1, config.k + 1)]
    if config.method == "p-eagle":
        return (rows[-1],)
    return tuple(more - fewer for fewer, more in pairwise(rows))


def _identity(batches: list[FlatBatch]) -> list[FlatBatch]:
    return batches
