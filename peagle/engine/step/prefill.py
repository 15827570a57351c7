"""PrefillRunner: the target and the drafter consume chunks of prompts, and drafting begins.

Like a decode step, a prefill has two halves: up to the target's tokens, and from them to the drafts
of the prompts that end. Each half is a CUDA graph where it is small. Large prefills keep the GPU
busy without one. A prefill whose size has no graph yet runs, padded, in the next larger one that
is captured, if that takes a millisecond or two at most: a capture takes dozens, but once.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.draft_shape import DraftShape
from peagle.engine.kv.kv_cache import KVCache
from peagle.engine.kv.slots import DecodeSlots
from peagle.engine.model.drafting import DraftRunner
from peagle.engine.model.verifier import Verifier
from peagle.engine.sampling.batch_sampling import BatchSampling
from peagle.engine.sampling.sampler import greedy_tokens, logprobs
from peagle.engine.schedule.prefill_layout import (
    MASK_ROW,
    PrefillInput,
    PrefillSize,
    layout_vector,
    split_vector,
)
from peagle.engine.schedule.request import PrefillChunk
from peagle.engine.step.graphs import Graphs
from peagle.engine.step.prefill_rows import draft_rows, target_rows
from peagle.engine.step.prefill_sizes import PrefillSizer
from peagle.engine.step.step_output import StepOutput
from peagle.kernels.triton.accept import pack_step_output
from peagle.kernels.triton.argmax import argmax
from peagle.kernels.triton.expand_rows import VerifiedBlock

log = logging.getLogger(__name__)


@dataclass(slots=True)
class ConsumedPrompts:
    """The first half of a prefill: the target has consumed the chunks."""

    tables: Tensor  # [N, P]
    hidden: Tensor  # [rows, taps * d]
    logits: Tensor  # [N, 1, vocabulary] of each request's last row
    tokens: Tensor  # [N, 1] the argmax, until sampled tokens overwrite it
    top_logits: Tensor  # [N, 1] the logit of the argmax


class PrefillRunner:
    def __init__(
        self,
        verifier: Verifier,
        drafter: DraftRunner | None,
        slots: DecodeSlots,
        kv_cache: KVCache,
        graphs: Graphs,
        weights: int,
    ) -> None:
        """`weights`: see PrefillSizer."""
        self.verifier = verifier
        self.drafter = drafter
        self.slots = slots
        self.kv_cache = kv_cache
        self.graphs = graphs
        self.sizer = PrefillSizer(drafter, weights)
        self._input_vectors: dict[PrefillSize, Tensor] = {}  # Graphs read their input from these.
        self._captured: dict[DraftShape, list[PrefillSize]] = {}  # By the shape that they draft.
        self.has_fixed_sizes = False  # Prefills run in graphs of their own size only.
        self._has_graph_memory = True

    @torch.inference_mode()
    def run(
        self,
        chunks: list[PrefillChunk],
        slots: list[int],
        draft_shape: DraftShape,
        sampling: BatchSampling,
        use_graphs: bool,
    ) -> StepOutput | None:
        """Consume the chunks, and draft behind the prompts that end.

        `sampling` and the result cover the requests that end a prompt and have no output yet.
        """
        use_graphs = use_graphs and self.sizer.has_graph(chunks)
        size = self.sizer.size(chunks, draft_shape.k, use_graphs)
        if use_graphs:
            size = self.captured_size(size, draft_shape)
        vector = layout_vector(chunks, slots, size, self.slots.padding_slot)
        inputs = split_vector(self._upload(vector, size, use_graphs), size)
        if use_graphs:
            self._capture_for_prefill(size, inputs, draft_shape)
        consumed: ConsumedPrompts = self.graphs.run(
            ("consume", size), lambda: self.consume(inputs, size)
        )
        new = [i for i, chunk in enumerate(chunks) if chunk.next_id is None]
        at_front = new == list(range(len(new)))
        index = slice(len(new)) if at_front else self.slots.upload(new)
        logits = consumed.logits[index]
        tokens = self._choose_tokens(consumed, logits, index, len(new), sampling)
        packed = self.graphs.run(
            ("fill", size, draft_shape),
            lambda: self.fill_slots(inputs, consumed, size, draft_shape),
        )
        if not new:
            return None
        output = StepOutput(packed[index].clone(), k=0)
        if sampling.top_logprobs is not None:
            output.logprobs = logprobs(logits, tokens, sampling.top_logprobs)
        return output

    def consume(self, inputs: PrefillInput, size: PrefillSize) -> ConsumedPrompts:
        """Run the target over all chunks."""
        tables = self.slots.tables[inputs.slot]
        rows = target_rows(inputs, tables, size, self.slots.page_size)
        logits, hidden = self.verifier.forward(inputs.ids, rows, self.kv_cache, inputs.last)
        tokens, top_logits = argmax(logits)
        return ConsumedPrompts(
            tables, hidden, logits[:, None], tokens[:, None], top_logits[:, None]
        )

    def _choose_tokens(
        self,
        consumed: ConsumedPrompts,
        logits: Tensor,
        index: slice | Tensor,
        count: int,
        sampling: BatchSampling,
    ) -> Tensor:
        """The first tokens [n, 1] of the new answers; also written to `consumed.tokens`."""
        tokens = consumed.tokens[index]
        masks = sampling.masks
        sampler = sampling.sampler if count else None
        if masks is not None:
            masks.apply(logits, [[]] * count)
            tokens = greedy_tokens(logits)
        if sampler is not None:
            none_emitted = torch.zeros(count, dtype=torch.int32, device=tokens.device)
            tokens = sampler.choose(logits, tokens[:, :0], none_emitted)
            sampler.commit(tokens, none_emitted)
        if masks is not None or sampler is not None:
            consumed.tokens[index] = tokens
        return tokens

    def fill_slots(
        self,
        inputs: PrefillInput,
        consumed: ConsumedPrompts,
        size: PrefillSize,
        draft_shape: DraftShape,
    ) -> Tensor:
        """Write the slots' state behind their chunks, drafts included. Returns a packed output."""
        slots = self.slots
        index = inputs.slot
        tokens = consumed.tokens
        newest = torch.where(inputs.next_id < 0, tokens[:, 0], inputs.next_id)
        slots.lengths[index] = inputs.end.int()
        slots.emitted[index] = inputs.emitted.int()
        slots.newest[index] = newest
        if self.drafter is not None:
            self._draft(self.drafter, inputs, consumed, newest, size, draft_shape)
        if slots.ngram is not None:
            slots.ngram.append(index, inputs.end - 1, newest[:, None])
            slots.ngram.look_up(index, inputs.end)
            slots.ngram.write_drafts(index, slots.trees, draft_shape)
        return pack_step_output(tokens, consumed.top_logits, torch.zeros_like(newest))

    def _draft(
        self,
        drafter: DraftRunner,
        inputs: PrefillInput,
        consumed: ConsumedPrompts,
        newest: Tensor,
        size: PrefillSize,
        draft_shape: DraftShape,
    ) -> None:
        """Run the drafter over the chunks.

        Drafts behind a chunk that does not end its prompt are meaningless, and are overwritten
        before they are read.
        """
        source = inputs.draft_source
        last = inputs.draft_last
        k = draft_shape.k
        ids = torch.where(
            inputs.draft_ids < 0, newest[inputs.draft_owner.clamp(min=0)], inputs.draft_ids
        )
        is_mask = (source == MASK_ROW)[:, None]
        fused = drafter.fc(consumed.hidden)[source.clamp(min=0)]
        hidden = torch.where(is_mask, drafter.mask_hidden, fused)
        embeds = torch.where(is_mask, drafter.mask_embedding, drafter.drafter.embed(ids))
        ends = self.slots.ends[inputs.slot]
        rows = draft_rows(inputs, consumed.tables, size, ends, self.slots.page_size)
        rows.bidirectional_rows = drafter.bidirectional_rows(k)
        normed, residual = drafter.layers.forward(embeds, hidden, rows, self.kv_cache, is_mask)
        if not k:
            return
        if drafter.parallel:
            depths = torch.arange(k, device=last.device)
            last = (last[:, None] + depths).clamp(max=size.draft_rows - 1).flatten()
        first = (inputs.end - 1).int()
        verified = VerifiedBlock(
            ids[:0],
            consumed.hidden,
            first,
            torch.zeros_like(first),
            newest,
            consumed.tables,
            ends,
        )
        drafter.draft_from_pass(
            normed, residual, last, verified, draft_shape, inputs.slot, self.slots.trees
        )

    # --- CUDA graphs ------------------------------------------------------------------------------

    def usual_sizes(self, max_batch: int, draft_shape: DraftShape) -> Iterator[PrefillSize]:
        """Sizes worth a graph before the first request: up to `max_batch` usual prompts."""
        return self.sizer.usual_sizes(max_batch, draft_shape.k)

    def captured_size(self, size: PrefillSize, draft_shape: DraftShape) -> PrefillSize:
        """The smallest captured size that holds `size` cheaply; `size` itself if there is none."""
        if self.has_fixed_sizes:
            return size
        captured = self._captured.get(draft_shape, [])
        fitting = [other for other in captured if self.sizer.is_padded_cheaply(size, other)]
        return min(fitting, key=lambda other: (other.rows, other.requests), default=size)

    @torch.inference_mode()
    def capture(self, size: PrefillSize, draft_shape: DraftShape) -> None:
        """Capture the two graphs of a size."""
        self._capture(size, self._padding(size, use_graphs=True), draft_shape)

    @torch.inference_mode()
    def launch_padding(self, size: PrefillSize, draft_shape: DraftShape) -> None:
        """Launch a pass of no request, without graphs."""
        inputs = self._padding(size, use_graphs=False)
        self.fill_slots(inputs, self.consume(inputs, size), size, draft_shape)

    def _padding(self, size: PrefillSize, use_graphs: bool) -> PrefillInput:
        vector = layout_vector([], [], size, self.slots.padding_slot)
        return split_vector(self._upload(vector, size, use_graphs), size)

    def _upload(self, vector: list[int], size: PrefillSize, use_graphs: bool) -> Tensor:
        """Copy the vector to the device; with graphs, to the tensor that graphs of `size` read."""
        uploaded = self.slots.upload(vector)
        if not use_graphs:
            return uploaded
        if size not in self._input_vectors:
            self._input_vectors[size] = torch.empty_like(uploaded)
        return self._input_vectors[size].copy_(uploaded, non_blocking=True)

    def _capture_for_prefill(
        self, size: PrefillSize, inputs: PrefillInput, draft_shape: DraftShape
    ) -> None:
        """Without memory for its graphs, this prefill and later ones run without new graphs."""
        if not self._has_graph_memory:
            return
        try:
            self._capture(size, inputs, draft_shape)
        except torch.OutOfMemoryError:
            log.warning("no memory is left for CUDA graphs: some prefills run without them")
            self._has_graph_memory = False

    def _capture(self, size: PrefillSize, inputs: PrefillInput, draft_shape: DraftShape) -> None:
        """Capture both graphs. The warm-up runs do the actual work, which may be repeated."""
        consume_key = ("consume", size)
        fill_key = ("fill", size, draft_shape)
        if fill_key in self.graphs:
            return

        def consume() -> ConsumedPrompts:
            return self.consume(inputs, size)

        def fill_slots(consumed: ConsumedPrompts) -> Tensor:
            return self.fill_slots(inputs, consumed, size, draft_shape)

        self.graphs.warm_up(lambda: fill_slots(consume()))
        if self.graphs.capture(consume_key, consume) and self.graphs.capture(
            fill_key, lambda: fill_slots(self.graphs.outputs[consume_key])
        ):
            self._captured.setdefault(draft_shape, []).append(size)
