"""Stepper: one decode step of a batch, entirely on the device: verify -> accept -> draft.

The host passes the slots that take part, the shape that is verified and the shape that is drafted
(peagle/draft_shape.py); everything else is in DecodeSlots. On a GPU a step is two CUDA graphs for
each batch size and shape: up to the target's tokens, and from them to the next drafts. Between the
two, logits are processed where a request needs more than the argmax.
"""

import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from peagle.draft_shape import NO_DRAFT, DraftShape
from peagle.drafter import Drafter
from peagle.drafter.replacement import private_copy
from peagle.engine.kv.deferred_rows import DeferredRows
from peagle.engine.kv.kv_cache import KVCache
from peagle.engine.kv.slots import DecodeSlots
from peagle.engine.model.drafting import DraftRunner
from peagle.engine.model.exactness import pad_rows
from peagle.engine.model.fused_llama import FusedLlamaTarget
from peagle.engine.model.mixture import find_router
from peagle.engine.model.paged_limits import check_paged_context
from peagle.engine.model.verifier import Passes, build_verifier
from peagle.engine.ngram.host_slots import HostNgramSlots
from peagle.engine.ngram.policy import DEFAULT_MIN_MATCH
from peagle.engine.sampling.batch_sampling import BatchSampling
from peagle.engine.sampling.forced_acceptance import ForcedAcceptance
from peagle.engine.sampling.sampler import greedy_tokens, logprobs
from peagle.engine.schedule.request import Request
from peagle.engine.step.batch_sizes import batch_bucket, graph_keys, padded_batch
from peagle.engine.step.graphs import Graphs
from peagle.engine.step.prefill import PrefillRunner
from peagle.engine.step.step_output import AcceptOutput, StepOutput
from peagle.engine.step.stepper_size import StepperSize, kv_shapes
from peagle.engine.step.verify_output import VerifyOutput, path_logits
from peagle.errors import UserError
from peagle.kernels.slot_state import SlotBatch
from peagle.kernels.triton.accept import accept
from peagle.kernels.triton.accept_tree import AcceptedPath, accept_tree
from peagle.kernels.triton.argmax import argmax
from peagle.kernels.triton.expand_rows import VerifiedBlock
from peagle.target import Target
from peagle.target.experts.stored_experts import StoredExperts
from peagle.target.gguf.modules import StoredLinear


class Stepper:
    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        size: StepperSize,
        passes: Passes | None = None,
    ) -> None:
        """`passes`: see `build_verifier`."""
        self.target = target
        check_paged_context(target, size.context)
        max_length = size.context + size.max_shape.nodes + 1
        self.verifier = build_verifier(target, max_length, passes)
        self._quantized_share = 0.0  # Matrices that kernels read in the target's own format.
        if target.format and isinstance(self.verifier, FusedLlamaTarget):
            self._quantized_share = self.verifier.use_codes()
        num_layers = len(target.layers)
        page_size = size.page_size
        self.kv_cache = KVCache(
            kv_shapes(target, drafter), size.num_pages, page_size, target.device, num_layers
        )
        self.slots = DecodeSlots(
            size.max_batch, size.max_shape, max_length, page_size, target.device
        )
        if size.ngram:
            self.slots.keep_tokens(DEFAULT_MIN_MATCH if drafter is not None else 0)
        self.drafter: DraftRunner | None = None
        self.deferred_rows: DeferredRows | None = None
        self.drafter_config = drafter.config if drafter is not None else None
        if drafter is not None:
            self.verifier.taps = tuple(drafter.config.aux_layer_ids or ())
            if self.on_gpu:  # `replace_drafter` overwrites the weights that graphs read.
                drafter = private_copy(drafter, target)
            self.drafter = DraftRunner(drafter, num_layers, max_length, page_size, self.kv_cache)
            if isinstance(self.verifier, FusedLlamaTarget) and self.verifier.is_stored:
                # Drafts need not be exact, and a drafter in int8 takes less time and memory. Its
                # acceptance length is the same (docs/cpu.md).
                self.drafter.quantize()
            if not self.on_gpu:
                self.deferred_rows = DeferredRows(size.max_batch, page_size)
        self.row_multiple = 1  # Exact mode pads passes to a multiple of rows.
        self.graphs = Graphs()
        weights = row_weight_count(target.layers)
        self.prefill = PrefillRunner(
            self.verifier, self.drafter, self.slots, self.kv_cache, self.graphs, weights
        )
        target.release_pages()
        self._forced_acceptance: ForcedAcceptance | None = None
        # By batch size: the slots of the last step, and the device tensor that graphs read.
        self._slot_indices: dict[int, tuple[list[int], Tensor]] = {}

    @property
    def weights(self) -> str:
        """The number format in which the layers' matrices are multiplied.

        Activations are named for stored weights only, where they may be rounded to bfloat16.
        """
        dtype = str(self.target.dtype).removeprefix("torch.")
        stored = self.target.stored_format
        if stored:
            if not self.verifier.is_stored:
                return f"{stored}, multiplied out to {dtype}"
            return stored if dtype == "float32" else f"{stored}, {dtype} activations"
        quantized = self.target.format
        if not quantized:
            return dtype
        has_stored_experts = any(isinstance(x, StoredExperts) for x in self.target.layers.modules())
        if has_stored_experts and not self._quantized_share:
            return f"{quantized.removesuffix(' experts')} experts, {dtype} elsewhere"
        if not self._quantized_share:
            return f"{quantized}, multiplied out to {dtype}"
        if self._quantized_share == 1:
            return quantized
        return f"{quantized}, {1 - self._quantized_share:.0%} in {dtype}"

    @property
    def batch_invariant(self) -> bool:
        """Whether the target runs with the kernels of exact mode."""
        return isinstance(self.verifier, FusedLlamaTarget) and self.verifier.batch_invariant

    def fix_pass_sizes(self, row_multiple: int) -> None:
        """Exact mode without batch-invariant kernels: the rows of a pass change the bits of a row.

        So they must not depend on what was captured before.
        """
        self.row_multiple = row_multiple
        self.prefill.has_fixed_sizes = True

    def quantize(self) -> None:
        """Convert the matrices of target and drafter to int8."""
        if not isinstance(self.verifier, FusedLlamaTarget):
            raise UserError(
                f"int8 is not supported for {self.target.name!r}, whose layers are not Llama-like:"
                " leave out `int8`"
            )
        self.verifier.quantize()
        if self.drafter is not None:
            self.drafter.quantize()

    def draft_runner(self, drafter: Drafter) -> DraftRunner | None:
        """The runner that replaces the current one; None where its weights are overwritten.

        It takes long, and steps may run meanwhile.
        """
        current = self.drafter
        return None if current is None or self.on_gpu else current.with_drafter(drafter)

    def replace_drafter(self, drafter: Drafter, runner: DraftRunner | None) -> None:
        """Draft with another version from now on; `runner`: see `draft_runner`.

        The KV cache and the waiting drafts stay those of the version before.
        """
        if runner is not None:
            self.drafter = runner
            self.prefill.drafter = runner
        elif self.drafter is not None:
            torch.cuda.synchronize(self.slots.device)  # The caller may have a stream of its own.
            self.drafter.copy_weights(drafter)
            torch.cuda.synchronize(self.slots.device)

    def release(self) -> None:
        """Drop the KV cache, the packed weights and the graphs. No step may follow."""
        self.__dict__.pop("kv_cache", None)
        self.__dict__.pop("verifier", None)
        self.__dict__.pop("prefill", None)
        self.drafter = None
        self.deferred_rows = None
        self.graphs = Graphs()
        self._slot_indices.clear()

    def enter(self, slot: int, request: Request) -> None:
        """Prepare a slot for its next request; prompt lookup needs its tokens."""
        if self.slots.ngram is not None:
            self.slots.ngram.write_prompt(slot, request.tokens)
        if self.deferred_rows is not None:
            self.deferred_rows.clear(slot)

    # --- one step ---------------------------------------------------------------------------------

    @torch.inference_mode()
    def decode(
        self,
        slots: list[int],
        verify_shape: DraftShape,
        draft_shape: DraftShape,
        sampling: BatchSampling,
        draft_counts: list[int] | None = None,
    ) -> StepOutput:
        """Verify the drafts of these slots as `verify_shape`, and draft anew as `draft_shape`.

        With a grammar in the batch, `verify_shape` must be a chain. `draft_counts`: how many
        drafts of a chain each slot has, where some have fewer; what follows is never accepted.
        On a CPU only: graphs do not read it.
        """
        count = len(slots)
        batch = self.graph_batch(count, verify_shape, draft_shape) if self.on_gpu else count
        index = self.slot_index(slots, batch)
        # Grammar masks need the drafts on the host, before the pass overwrites them.
        drafts: list[list[int]] = []
        if sampling.masks is not None:
            drafts = self.slots.trees.chain[index[:count], : verify_shape.k].tolist()
        verify_key, accept_key = graph_keys(batch, verify_shape, draft_shape)
        started = time.perf_counter()
        verified: VerifyOutput = self.graphs.run(
            verify_key, lambda: self.verify(index, verify_shape)
        )
        verify_seconds = time.perf_counter() - started
        self._choose_tokens(verified, index[:count], verify_shape, sampling, drafts)
        started = time.perf_counter()
        counts = None if draft_counts is None else self.slots.upload(draft_counts, np.int32)
        packed, path_rows, draft_confidence = self.graphs.run(
            accept_key,
            lambda: self.accept_and_draft(index, verified, verify_shape, draft_shape, counts),
        )
        draft_seconds = time.perf_counter() - started
        output = StepOutput(packed[:count], verify_shape.k, draft_confidence=draft_confidence)
        if sampling.sampler is not None:
            sampling.sampler.commit(output.tokens, output.accepted)
        if not self.on_gpu:
            output.verify_seconds = verify_seconds
            output.draft_seconds = draft_seconds
        if sampling.top_logprobs is not None:
            logits = path_logits(verified.logits, path_rows)[:count]
            output.logprobs = logprobs(logits, output.tokens, sampling.top_logprobs)
        return output

    def verify(self, index: Tensor, shape: DraftShape) -> VerifyOutput:
        """Run the target over the newest token and the drafts of each slot in `index` [B]."""
        gathered, rows = self.slots.verify_rows(index, shape)
        ids = gathered.ids
        logits, hidden = self.verifier.forward(
            *pad_rows(ids.flatten(), rows, self.row_multiple), self.kv_cache
        )
        logits = logits[: ids.numel()]
        hidden = hidden[: ids.numel()]
        tokens, top_logits = (x.view(ids.shape) for x in argmax(logits))
        logits = logits.view(*ids.shape, -1)
        return VerifyOutput(rows, ids, hidden, logits, tokens, top_logits, gathered.ends)

    def _choose_tokens(
        self,
        verified: VerifyOutput,
        index: Tensor,
        shape: DraftShape,
        sampling: BatchSampling,
        drafts: list[list[int]],
    ) -> None:
        """Overwrite the argmax where a grammar or sampling settings ask for another token."""
        if sampling.masks is None and sampling.sampler is None:
            return
        count = len(index)
        logits = verified.logits[:count]
        tokens = verified.tokens[:count]
        if sampling.masks is not None:
            assert shape.is_chain
            sampling.masks.apply(logits, drafts)
            tokens.copy_(greedy_tokens(logits))
        if sampling.sampler is not None:
            emitted = self.slots.emitted[index]
            seen = None if shape.is_chain else self.slots.trees.masks[index, : shape.nodes + 1]
            tokens.copy_(sampling.sampler.choose(logits, verified.ids[:count, 1:], emitted, seen))

    def accept_and_draft(
        self,
        index: Tensor,
        verified: VerifyOutput,
        verify_shape: DraftShape,
        draft_shape: DraftShape,
        draft_counts: Tensor | None = None,
    ) -> AcceptOutput:
        """Accept drafts, advance the slots, and write the next drafts to them."""
        if self._forced_acceptance is not None:
            self._forced_acceptance.apply(verified.tokens, verified.ids, verify_shape, index)
        first = verified.rows.first_positions
        page_tables = verified.rows.page_tables
        path = self._accept(index, verified, verify_shape, draft_counts)
        accepted = path.accepted_counts
        if path.path_rows is not None:
            self.kv_cache.compact_path(first, accepted, path.path_rows, page_tables)
        ngram = self.slots.ngram
        if ngram is not None:
            ngram.append(index, first, path.packed[:, : verify_shape.k + 1])
            ngram.look_up(index, self.slots.lengths[index])
            if isinstance(ngram, HostNgramSlots) and ngram.skips(index):
                draft_shape = NO_DRAFT  # The drafter only brings its KV cache up to date.
        draft_confidence = None
        if self.drafter is not None:
            hidden = verified.hidden
            if path.flat_rows is not None:
                hidden = hidden[path.flat_rows]
            block = VerifiedBlock(
                path.path_ids, hidden, first, accepted, path.newest, page_tables, verified.ends
            )
            draft_confidence = self._draft(self.drafter, block, draft_shape, index)
        if ngram is not None:
            ngram.write_drafts(index, self.slots.trees, draft_shape)
        return AcceptOutput(path.packed, path.flat_rows, draft_confidence)

    def _draft(
        self, drafter: DraftRunner, block: VerifiedBlock, shape: DraftShape, index: Tensor
    ) -> Tensor | None:
        """Write the next drafts to the slots `index`, and bring the drafter's KV cache up to date.

        Without drafts that may wait for a later step. Returns the draft confidence, if any.
        """
        if self.deferred_rows is not None:
            next_block = self.deferred_rows.next_block(index, block, drafts=shape != NO_DRAFT)
            if next_block is None:
                return None
            block = next_block
        return drafter.draft(block, shape, index, self.slots.trees)

    def _accept(
        self,
        index: Tensor,
        verified: VerifyOutput,
        shape: DraftShape,
        draft_counts: Tensor | None,
    ) -> AcceptedPath:
        """Accept drafts by the rule of kernels/triton/accept.py, or accept_tree.py for a tree."""
        slots = self.slots
        tokens = verified.tokens
        top_logits = verified.top_logits
        ids = verified.ids
        first = verified.rows.first_positions
        ends = verified.ends
        if draft_counts is not None:
            ends = torch.minimum(ends, first + 1 + draft_counts)
        batch = SlotBatch(index, first, ends)
        if not shape.is_chain:
            return accept_tree(tokens, top_logits, ids, slots.trees, batch, slots.state, shape.k)
        chain = accept(tokens, top_logits, ids[:, 1:], batch, slots.state)
        return AcceptedPath(chain.accepted_counts, chain.newest, None, None, ids, chain.packed)

    @property
    def runs_in_c(self) -> bool:
        """Whether the layers of the target are C kernels, which have threads of their own."""
        return isinstance(self.verifier, FusedLlamaTarget) and self.verifier.cpu_layers is not None

    @property
    def on_gpu(self) -> bool:
        return self.slots.device.type == "cuda"

    def slot_index(self, slots: list[int], batch: int) -> Tensor:
        """The slots as a device tensor, padded to `batch`; on a GPU one tensor per batch size."""
        padded = slots + [self.slots.padding_slot] * (batch - len(slots))
        if not self.on_gpu:
            return self.slots.upload(padded)
        previous, index = self._slot_indices.get(batch) or (padded, self.slots.upload(padded))
        if previous != padded:
            index.copy_(self.slots.upload(padded), non_blocking=True)
        self._slot_indices[batch] = padded, index
        return index

    def force_acceptance(self, probabilities: list[float]) -> None:
        """For measurements: see ForcedAcceptance; `probabilities` are those of a chain."""
        forced = ForcedAcceptance(probabilities, self.slots.trees, self.target.vocab_size)
        self._forced_acceptance = forced
        if self.drafter is not None:
            self.drafter.forced_draw = forced.draw

    # --- CUDA graphs ------------------------------------------------------------------------------

    def is_captured(self, count: int, verify_shape: DraftShape, draft_shape: DraftShape) -> bool:
        """Whether there are graphs for this many requests, of their batch size or a larger one."""
        batch = self.graph_batch(count, verify_shape, draft_shape)
        return self.has_graph(batch, verify_shape, draft_shape)

    def has_graph(self, batch: int, verify_shape: DraftShape, draft_shape: DraftShape) -> bool:
        return graph_keys(batch, verify_shape, draft_shape)[1] in self.graphs

    def graph_batch(self, count: int, verify_shape: DraftShape, draft_shape: DraftShape) -> int:
        """The batch size whose graphs run this many requests."""
        return padded_batch(count, lambda b: self.has_graph(b, verify_shape, draft_shape))

    @torch.inference_mode()
    def capture(self, count: int, verify_shape: DraftShape, draft_shape: DraftShape) -> bool:
        """Capture the two graphs of a batch size and its shapes.

        Returns False if the target synchronizes with the host during a pass.
        """
        batch = batch_bucket(count)
        index = self.slot_index([self.slots.padding_slot] * batch, batch)
        verify_key, accept_key = graph_keys(batch, verify_shape, draft_shape)

        def verify() -> VerifyOutput:
            return self.verify(index, verify_shape)

        def accept_and_draft(verified: VerifyOutput) -> AcceptOutput:
            return self.accept_and_draft(index, verified, verify_shape, draft_shape)

        # With another drafted shape, there is a graph of the verification already.
        self.graphs.warm_up(lambda: accept_and_draft(self.graphs.run(verify_key, verify)))
        return self.graphs.capture(verify_key, verify) and self.graphs.capture(
            accept_key, lambda: accept_and_draft(self.graphs.outputs[verify_key])
        )

    @torch.inference_mode()
    def launch_padding(
        self, batch: int, verify_shape: DraftShape, draft_shapes: Iterable[DraftShape]
    ) -> None:
        """Launch steps of no request, one for each drafted shape, without graphs."""
        index = self.slot_index([self.slots.padding_slot] * batch, batch)
        verified = self.verify(index, verify_shape)
        for draft_shape in draft_shapes:
            self.accept_and_draft(index, verified, verify_shape, draft_shape)


def row_weight_count(layers: nn.Module) -> int:
    """The number of weights that one row is multiplied with: of experts, those of its top k.

    Experts whose router is built otherwise, as some of transformers are, all count.
    """
    total = weight_count(layers)
    mlp: Any
    for mlp in layers.modules():
        router = find_router(mlp)
        top_k = getattr(router, "top_k", None)
        weight = getattr(router, "weight", None)  # [experts, d]
        if isinstance(top_k, int) and weight is not None:
            idle_share = 1 - top_k / len(weight)
            total -= round(weight_count(mlp.experts) * idle_share)
    return total


def weight_count(layers: nn.Module) -> int:
    """The number of weights, those as stored included."""
    stored = [x.weight.shape for x in layers.modules() if isinstance(x, StoredLinear)]
    experts = [x.weight_count for x in layers.modules() if isinstance(x, StoredExperts)]
    parameters = sum(p.numel() for p in layers.parameters())
    return parameters + sum(rows * cols for rows, cols in stored) + sum(experts)
