"""One step of a batch, on the device from end to end: verify -> accept -> draft.

The host says which places take part, and the form of what is verified and of what is drafted (peagle/tree.py);
everything else is in `Places`. On a GPU a step is two CUDA graphs, per size of the batch and form: up to the
target's tokens, and from them to the next drafts; between the two, logits are processed where a request wants more
than the likeliest token.
"""

import time
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.draft_shape import DraftShape
from peagle.drafter import Drafter
from peagle.engine.kv.kv_cache import KVCache, KVShape
from peagle.engine.kv.slots import DecodeSlots
from peagle.engine.model.drafting import DraftRunner, Verified
from peagle.engine.model.exactness import filled
from peagle.engine.model.fused_llama import FusedLlamaTarget
from peagle.engine.model.verifier import cache_shapes, verifier_for
from peagle.engine.sampling.grammar_masks import GrammarMasks
from peagle.engine.sampling.sampler import Sampler, likeliest, logprobs
from peagle.engine.step.graphs import Graphs
from peagle.engine.step.prefill import PrefillRunner
from peagle.engine.step.step_output import AcceptOutput, StepOutput
from peagle.errors import UserError
from peagle.kernels.row_pass import RowPass
from peagle.kernels.slot_state import SlotBatch
from peagle.kernels.triton.accept import accept
from peagle.kernels.triton.accept_tree import AcceptedPath, accept_tree
from peagle.kernels.triton.argmax import argmax
from peagle.target import Target

BATCH_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


@dataclass(slots=True)
class VerifyInput:
    """The first half of a step: what the target consumed and said."""

    rows: RowPass
    ids: Tensor  # [B, R]
    hidden: Tensor  # [B * R, taps * d]
    logits: Tensor  # [B, R, vocabulary]
    tokens: Tensor  # [B, R] the likeliest, until they are overwritten
    tops: Tensor  # [B, R] their logits
    ends: Tensor  # [B]


class Stepper:
    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        largest: DraftShape,
        pages: int,
        page: int,
        batch: int,
        context: int,
    ) -> None:
        """`largest`: no form has more depths or nodes."""
        self.target = target
        length = context + largest.nodes + 1
        self.verifier = verifier_for(target, length)
        self.small = (
            self.verifier.shrink()
            if target.format and isinstance(self.verifier, FusedLlamaTarget)
            else 0.0
        )
        shapes = kv_shapes(target, drafter)
        self.memory = KVCache(shapes, pages, page, target.device, len(target.layers))
        self.places = DecodeSlots(batch, largest, length, page, target.device)
        self.drafting = None
        if drafter is not None:
            self.verifier.taps = tuple(drafter.config.aux_layer_ids or ())
            self.drafting = DraftRunner(drafter, len(target.layers), length, page, self.memory)
        self.forced: Tensor | None = None
        self.multiple = 1  # exact mode fills passes up to a multiple of rows
        self.graphs = Graphs()
        weights = sum(p.numel() for p in target.layers.parameters())
        self.prefilling = PrefillRunner(
            self.verifier, self.drafting, self.places, self.memory, self.graphs, weights
        )
        self.inputs: dict[
            int, tuple[list[int], Tensor]
        ] = {}  # the last places of each size of the batch

    @property
    def weights(self) -> str:
        """What the layers' matrices are multiplied as."""
        dtype = str(self.target.dtype).removeprefix("torch.")
        if not self.target.format or not self.small:
            return (
                f"{self.target.format}, multiplied out to {dtype}" if self.target.format else dtype
            )
        return (
            self.target.format
            if self.small == 1
            else f"{self.target.format}, {1 - self.small:.0%} in {dtype}"
        )

    def quantize(self) -> None:
        """Matrices of target and drafter in int8 from now on."""
        if not isinstance(self.verifier, FusedLlamaTarget):
            raise UserError(
                f"int8 cannot be had for {self.target.name!r}: its layers are not Llama-like. Leave it out"
            )
        self.verifier.quantize()
        if self.drafting is not None:
            self.drafting.quantize()

    @torch.inference_mode()
    def decode(
        self,
        at: list[int],
        tree: DraftShape,
        made: DraftShape,
        processing: Sampler | None,
        top: int | None = None,
        masks: GrammarMasks | None = None,
    ) -> StepOutput:
        """Verifies the drafts of these places in the form `tree` and makes new ones in the form `made`.

        `processing`: None if all is plain; `top`: log-probabilities are wanted, of so many likeliest tokens; `masks`:
        None if nobody is bound to a grammar; who is, verifies a chain.
        """
        count = len(at)
        batch = batch_bucket(count) if self.places.device.type == "cuda" else count
        index = self._index(at, batch)
        chains = self.places.trees.chain
        drafts = (
            chains[index[:count], : tree.k].tolist() if masks is not None else []
        )  # before the pass
        verify, settle = keys_of(batch, tree, made)
        clock = [time.perf_counter()]
        block: VerifyInput = self.graphs.run(verify, lambda: self.verify(index, tree))
        clock.append(time.perf_counter())
        logits, tokens = block.logits[:count], block.tokens[:count]
        if masks is not None:
            assert tree.chain
            masks.apply(logits, drafts)
            tokens.copy_(likeliest(logits))
        if processing is not None:
            emitted = self.places.emitted[index[:count]]
            seen = None if tree.chain else self.places.trees.masks[index[:count], : tree.nodes + 1]
            tokens.copy_(processing.choose(logits, block.ids[:count, 1:], emitted, seen))
        clock.append(time.perf_counter())
        packed, rows, outlook = self.graphs.run(
            settle, lambda: self.settle(index, block, tree, made)
        )
        clock.append(time.perf_counter())
        packed = packed[:count]
        told, kept = packed[:, : tree.k + 1], packed[:, tree.k + 1]
        if processing is not None:
            processing.commit(told, kept)
        output = StepOutput(packed, outlook=outlook)
        if self.places.device.type == "cpu":
            output.verify_seconds = clock[1] - clock[0]
            output.draft_seconds = clock[3] - clock[2]
        if top is not None:
            if rows is not None:
                logits = block.logits.flatten(0, 1)[rows].unflatten(0, (batch, -1))[:count]
            output.logprobs = logprobs(logits, told, top)
        return output

    def verify(self, index: Tensor, tree: DraftShape) -> VerifyInput:
        """The target consumes the newest token and the drafts of each place."""
        taken, rows = self.places.rows(index, tree)
        ids = taken.ids
        logits, hidden = self.verifier.forward(
            *filled(ids.flatten(), rows, self.multiple), self.memory
        )
        logits, hidden = logits[: ids.numel()], hidden[: ids.numel()]
        tokens, tops = (x.view(ids.shape) for x in argmax(logits))
        return VerifyInput(rows, ids, hidden, logits.view(*ids.shape, -1), tokens, tops, taken.ends)

    def settle(
        self, index: Tensor, block: VerifyInput, tree: DraftShape, made: DraftShape
    ) -> AcceptOutput:
        """Accepts, moves the places on, drafts anew."""
        if self.forced is not None:
            self._force(block)
        first, tables = block.rows.first_positions, block.rows.page_tables
        walked = self._accept(index, block, tree)
        rows = walked.flat_rows
        if walked.path_rows is not None:
            self.memory.settle(first, walked.accepted_counts, walked.path_rows, tables)
        outlook = None
        if self.drafting is not None:
            hidden = block.hidden if rows is None else block.hidden[rows]
            verified = Verified(
                walked.path_ids,
                hidden,
                first,
                walked.accepted_counts,
                walked.newest,
                tables,
                block.ends,
            )
            outlook = self.drafting.draft(verified, made, index, self.places.trees)
        return AcceptOutput(walked.packed, rows, outlook)

    def _accept(self, index: Tensor, block: VerifyInput, tree: DraftShape) -> AcceptedPath:
        """What holds, as a chain: of a tree its accepted path."""
        trees, state = self.places.trees, self.places.state
        batch = SlotBatch(index, block.rows.first_positions, block.ends)
        if not tree.chain:
            return accept_tree(block.tokens, block.tops, block.ids, trees, batch, state, tree.k)
        accepted = accept(block.tokens, block.tops, block.ids[:, 1:], batch, state)
        return AcceptedPath(
            accepted.accepted_counts, accepted.newest, None, None, block.ids, accepted.packed
        )

    def _index(self, at: list[int], batch: int) -> Tensor:
        """The places of a batch, filled up with the one that is nobody's; one tensor per size, for the graphs."""
        filled = at + [self.places.count] * (batch - len(at))
        if self.places.device.type != "cuda":
            return self.places.upload(filled)
        before, there = self.inputs.get(batch) or (filled, self.places.upload(filled))
        if before != filled:
            there.copy_(self.places.upload(filled), non_blocking=True)
        self.inputs[batch] = filled, there
        return there

    def force(self, conditional: list[float]) -> None:
        """For measurements of chains: from now on draft i is right with this probability, given that those before it
        were; drafts behind the last of them never are."""
        drafts = self.places.trees.chain.shape[1]
        self.forced = torch.tensor(
            [*conditional, *[0.0] * drafts][:drafts], device=self.places.device
        )

    def _force(self, block: VerifyInput) -> None:
        assert self.forced is not None and block.rows.tree_masks is None, "chains are measured"
        drafts = block.ids[:, 1:]
        right = torch.rand(drafts.shape, device=drafts.device) < self.forced[: drafts.shape[1]]
        block.tokens[:, :-1] = torch.where(right, drafts, (drafts + 1) % block.logits.shape[-1])

    def split(
        self, count: int, tree: DraftShape, repeats: int = 30
    ) -> tuple[float | None, float | None]:
        """Milliseconds of a step's two halves, by their graphs: the target's pass, and acceptance with drafting."""
        batch = batch_bucket(count)
        first, second = (
            self.graphs.milliseconds(key, repeats) for key in keys_of(batch, tree, tree)
        )
        return first, second

    def costs(self, forms: Iterable[DraftShape]) -> dict[tuple[int, DraftShape], float]:
        """Seconds of a step by batch size and form, where there are graphs for it."""
        told = {
            (batch, form): self.split(batch, form, repeats=5)
            for batch in BATCH_BUCKETS
            for form in forms
        }
        return {
            at: (first + second) / 1000 for at, (first, second) in told.items() if first and second
        }

    def captured(self, count: int, tree: DraftShape, made: DraftShape) -> bool:
        return keys_of(batch_bucket(count), tree, made)[1] in self.graphs

    @torch.inference_mode()
    def capture(self, count: int, tree: DraftShape, made: DraftShape) -> bool:
        """Makes the two graphs of a batch size and form. False: this target asks the host in between, and has none."""
        batch = batch_bucket(count)
        index = self._index([self.places.count] * batch, batch)
        self.graphs.warm(lambda: self.settle(index, self.verify(index, tree), tree, made))
        first, second = keys_of(batch, tree, made)
        return self.graphs.capture(first, lambda: self.verify(index, tree)) and self.graphs.capture(
            second, lambda: self.settle(index, self.graphs.outputs[first], tree, made)
        )


def keys_of(batch: int, tree: DraftShape, made: DraftShape) -> tuple[Hashable, Hashable]:
    """Of a step's two graphs."""
    return ("verify", batch, tree), ("settle", batch, tree, made)


def batch_bucket(count: int) -> int:
    """The size of the batch that holds so many: there is a graph for each."""
    return next((size for size in BATCH_BUCKETS if size >= count), count)


def kv_shapes(target: Target, drafter: Drafter | None) -> list[KVShape]:
    """What a position stores: of every layer of the target, then of the drafter."""
    shapes = cache_shapes(target)
    if drafter is not None:
        config = drafter.config
        shapes += [
            KVShape(config.num_kv_heads, config.head_dim, drafter.fc.weight.dtype)
        ] * config.num_layers
    return shapes
