"""One step of a batch, on the device from end to end: verify -> accept -> draft.

The host says which places take part and how many drafts to verify and to make; everything else is in `Places`. On a GPU
a step is two CUDA graphs, per size of the batch and K: up to the target's tokens, and from them to the next drafts;
between the two, logits are processed where a request wants more than the likeliest token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.drafter import Drafter
from peagle.engine.drafting import Drafting, Verified
from peagle.engine.exactness import filled
from peagle.engine.graphs import Graphs
from peagle.engine.lean import LeanTarget
from peagle.engine.memory import Memory, Shape
from peagle.engine.places import Places
from peagle.engine.prefilling import Prefilling
from peagle.engine.processing import Processing, broken, likeliest, logprobs
from peagle.engine.rowpass import RowPass
from peagle.engine.stepresult import Result
from peagle.engine.verifier import cache_shapes, verifier_for
from peagle.errors import UserError
from peagle.kernels.accept import accept
from peagle.target import Target

LONG, PROGRAMS, SPLITS = 1024, 132, 8  # keys; programs that keep a GPU busy; shares of long contexts
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


@dataclass(slots=True)
class Block:
    """The first half of a step: what the target consumed and said."""

    rows: RowPass
    ids: Tensor  # [B, R]
    hidden: Tensor  # [B * R, taps * d]
    logits: Tensor  # [B, R, vocabulary]
    tokens: Tensor  # [B, R] the likeliest, until they are overwritten
    ends: Tensor  # [B]


class Stepper:
    def __init__(
        self, target: Target, drafter: Drafter | None, k: int, pages: int, page: int, batch: int, context: int
    ) -> None:
        self.target = target
        length = context + k + 1
        self.verifier = verifier_for(target, length)
        shapes = shapes_of(target, drafter)
        self.memory = Memory(shapes, pages, page, target.device)
        self.places = Places(batch, k, length, page, target.device)
        self.drafting = None
        if drafter is not None:
            self.verifier.taps = tuple(drafter.config.aux_layer_ids or ())
            self.drafting = Drafting(drafter, len(target.layers), length, page, self.memory)
        self.forced: Tensor | None = None
        self.multiple = 1  # exact mode fills passes up to a multiple of rows
        self.graphs = Graphs()
        self.prefilling = Prefilling(self.verifier, self.drafting, self.places, self.memory, self.graphs)
        self.inputs: dict[int, Tensor] = {}

    def quantise(self) -> None:
        """Matrices of target and drafter in int8 from now on."""
        if not isinstance(self.verifier, LeanTarget):
            raise UserError(f"int8 cannot be had for {self.target.name!r}: its layers are not Llama-like. Leave it out")
        self.verifier.quantise()
        if self.drafting is not None:
            self.drafting.quantise()

    @torch.inference_mode()
    def decode(
        self,
        at: list[int],
        k: int,
        k_next: int,
        processing: Processing | None,
        top: int | None = None,
        longest: int = 0,
    ) -> Result:
        """Verifies the k drafts of these places and makes k_next new ones.

        `processing`: None if all is plain; `top`: log-probabilities are wanted, of so many likeliest tokens; `longest`:
        no place is longer than this.
        """
        count = len(at)
        batch = bucket(count) if self.places.device.type == "cuda" else count
        index = self._index(at, batch)
        splits = self.splits(batch, longest)
        block: Block = self.graphs.run(("verify", batch, k, splits), lambda: self.verify(index, k, splits))
        logits, tokens = block.logits[:count], block.tokens[:count]
        if processing is not None:
            tokens.copy_(processing.choose(logits, block.ids[:count, 1:], self.places.emitted[index[:count]]))
        second = "settle", batch, k, k_next, splits
        packed = self.graphs.run(second, lambda: self.settle(index, block, k_next))[:count]
        if processing is not None:
            processing.commit(tokens, packed[:, -2])
        return Result(packed, None if top is None else logprobs(logits, tokens, top))

    def splits(self, batch: int, longest: int) -> int:
        """Programs that share the keys of a request: on a GPU, where there are few requests and many keys."""
        heads = self.memory.keys[0].shape[1]
        return 1 if longest <= LONG or batch * heads >= PROGRAMS or not self.memory.keys[0].is_cuda else SPLITS

    def verify(self, index: Tensor, k: int, splits: int = 1) -> Block:
        """The target consumes the newest token and k drafts of each place."""
        places = self.places
        rows = places.rows(index, k + 1, splits)
        ids = torch.cat([places.newest[index][:, None], places.drafts[index, :k]], 1)
        logits, hidden = self.verifier.forward(*filled(ids.flatten(), rows, self.multiple), self.memory)
        logits, hidden = logits[: ids.numel()].view(*ids.shape, -1), hidden[: ids.numel()]
        return Block(rows, ids, hidden, logits, likeliest(logits), places.ends[index])

    def settle(self, index: Tensor, block: Block, k_next: int) -> Tensor:
        """Accepts, moves the places on, drafts anew. Returns a result's `packed`."""
        places, first = self.places, block.rows.first
        room = (block.ends - 1 - first).clamp(min=0)
        if self.forced is not None:
            self._force(block)
        kept, newest = accept(block.tokens, block.ids[:, 1:], room)
        places.lengths[index] = first + kept + 1
        places.emitted[index] += kept + 1
        places.newest[index] = newest
        if self.drafting is not None:
            verified = Verified(
                block.ids, block.hidden, first, kept, newest, block.rows.tables, block.ends, block.rows.splits
            )
            places.drafts[index, :k_next] = self.drafting.draft(verified, k_next)
        return torch.cat([block.tokens, kept[:, None], broken(block.logits)[:, None]], 1)

    def _index(self, at: list[int], batch: int) -> Tensor:
        """The places of a batch, filled up with the one that is nobody's; one tensor per size, for the graphs."""
        filled = at + [self.places.count] * (batch - len(at))
        new = self.places.upload(filled, torch.long)
        if self.places.device.type != "cuda":
            return new
        if batch not in self.inputs:
            self.inputs[batch] = new.clone()
        return self.inputs[batch].copy_(new, non_blocking=True)

    def force(self, conditional: list[float]) -> None:
        """For measurements: from now on draft i is right with this probability, given that those before it were."""
        self.forced = torch.tensor(conditional, device=self.places.device)

    def _force(self, block: Block) -> None:
        assert self.forced is not None
        drafts = block.ids[:, 1:]
        right = torch.rand(drafts.shape, device=drafts.device) < self.forced[: drafts.shape[1]]
        block.tokens[:, :-1] = torch.where(right, drafts, (drafts + 1) % block.logits.shape[-1])

    def split(self, count: int, k: int) -> tuple[float | None, float | None]:
        """Milliseconds of a step's two halves, by their graphs: the target's pass, and acceptance with drafting."""
        batch = bucket(count)
        first, second = (self.graphs.milliseconds(key) for key in (("verify", batch, k, 1), ("settle", batch, k, k, 1)))
        return first, second

    def captured(self, count: int, k: int, k_next: int, longest: int = 0) -> bool:
        batch = bucket(count)
        return ("settle", batch, k, k_next, self.splits(batch, longest)) in self.graphs

    @torch.inference_mode()
    def capture(self, count: int, k: int, k_next: int, longest: int = 0) -> bool:
        """Makes the two graphs of a batch size and K. False: this target asks the host in between, and has none."""
        batch = bucket(count)
        splits = self.splits(batch, longest)
        index = self._index([self.places.count] * batch, batch)
        self.graphs.warm(lambda: self.settle(index, self.verify(index, k, splits), k_next))
        first, second = ("verify", batch, k, splits), ("settle", batch, k, k_next, splits)
        return self.graphs.capture(first, lambda: self.verify(index, k, splits)) and self.graphs.capture(
            second, lambda: self.settle(index, self.graphs.outputs[first], k_next)
        )


def bucket(count: int) -> int:
    """The size of the batch that holds so many: there is a graph for each."""
    return next((size for size in BUCKETS if size >= count), count)


def shapes_of(target: Target, drafter: Drafter | None) -> list[Shape]:
    """What a position stores: of every layer of the target, then of the drafter."""
    shapes = cache_shapes(target)
    if drafter is not None:
        config = drafter.config
        shapes += [Shape(config.num_kv_heads, config.head_dim, drafter.fc.weight.dtype)] * config.num_layers
    return shapes
