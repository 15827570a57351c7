"""Prompts, piece by piece: the target consumes chunks, then the drafter does, and drafts where a prompt ends.

Like a step in two halves, each a CUDA graph where it is small: up to the target's tokens, and from them to the drafts.
Large prefills have enough to compute and run as they are.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from peagle.draft_shape import DraftShape
from peagle.engine.kv.kv_cache import KVCache
from peagle.engine.kv.slots import DecodeSlots
from peagle.engine.model.drafting import DraftRunner, Verified
from peagle.engine.model.verifier import Verifier
from peagle.engine.sampling.grammar_masks import GrammarMasks
from peagle.engine.sampling.sampler import Sampler, likeliest, logprobs
from peagle.engine.schedule.prefill_layout import MASK, Size, numbers_of, views_of
from peagle.engine.schedule.request import PrefillChunk
from peagle.engine.step.graphs import Graphs
from peagle.engine.step.step_output import StepOutput
from peagle.kernels.row_pass import RowPass
from peagle.kernels.triton.accept import pack_step_output
from peagle.kernels.triton.argmax import argmax

ROWS = (16, 32, 64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096)  # sizes of graphs
REQUESTS = (1, 2, 4, 8, 16, 32, 64)
MOST = 512  # rows of one request in most passes
WORK = 2e12  # rows * weights that keep a GPU busy (10 ms) while the host launches a pass that is not a graph


@dataclass(slots=True)
class Consumed:
    """The first half: what the target has read and says."""

    tables: Tensor  # [N, P]
    hidden: Tensor  # [rows, taps * d]
    logits: Tensor  # [N, 1, vocabulary] at each request's last row
    tokens: Tensor  # [N, 1] the likeliest, until they are overwritten
    tops: Tensor  # [N, 1] their logits


class PrefillRunner:
    def __init__(
        self,
        verifier: Verifier,
        drafting: DraftRunner | None,
        places: DecodeSlots,
        memory: KVCache,
        graphs: Graphs,
        weights: int,
    ) -> None:
        """`weights`: of the target's layers."""
        self.largest = max((size for size in ROWS if size * weights <= WORK), default=ROWS[0])
        self.verifier, self.drafting, self.places, self.memory, self.graphs = (
            verifier,
            drafting,
            places,
            memory,
            graphs,
        )
        self.vectors: dict[Size, Tensor] = {}

    @torch.inference_mode()
    def run(
        self,
        chunks: list[PrefillChunk],
        at: list[int],
        tree: DraftShape,
        processing: Sampler | None,
        top: int | None,
        graphs: bool,
        masks: GrammarMasks | None = None,
    ) -> StepOutput | None:
        """Consumes the chunks; `tree`: the form of the drafts behind prompts. `processing`, `masks` and the
        result: of those that end a prompt and have no answer."""
        size = self.size(chunks, tree.k, graphs)
        vector = self._upload(numbers_of(chunks, at, size, self.places.count), size, graphs)
        part = views_of(vector, size)
        if graphs and self.small(size.rows, size.requests):
            self._capture(size, part, tree)
        consumed: Consumed = self.graphs.run(("consume", size), lambda: self.consume(part, size))
        fresh = [i for i, chunk in enumerate(chunks) if chunk.next_id is None]
        first = fresh == list(range(len(fresh)))
        who = slice(len(fresh)) if first else self.places.upload(fresh)
        logits, tokens = consumed.logits[who], consumed.tokens[who]
        if masks is not None:
            masks.apply(logits, [[]] * len(fresh))
            tokens = likeliest(logits)
        if processing is not None and fresh:
            nothing = torch.zeros(len(fresh), dtype=torch.int32, device=tokens.device)
            tokens = processing.choose(logits, tokens[:, :0], nothing)
            processing.commit(tokens, nothing)
        if masks is not None or (processing is not None and fresh):
            consumed.tokens[who] = tokens
        packed = self.graphs.run(
            ("seat", size, tree), lambda: self.seat(part, consumed, size, tree)
        )
        if not fresh:
            return None
        told = None if top is None else logprobs(logits, tokens, top)
        return StepOutput(packed[who].clone(), told)

    def consume(self, part: dict[str, Any], size: Size) -> Consumed:
        tables = self.places.tables[part["place"]]
        rows = self._rows(part, tables, size.most, "")
        logits, hidden = self.verifier.forward(part["ids"], rows, self.memory, part["last"])
        tokens, tops = argmax(logits)
        return Consumed(tables, hidden, logits[:, None], tokens[:, None], tops[:, None])

    def seat(
        self, part: dict[str, Any], consumed: Consumed, size: Size, tree: DraftShape
    ) -> Tensor:
        """The places behind their chunks, with drafts. Returns a result's `packed`."""
        places, at, tokens = self.places, part["place"], consumed.tokens
        newest = torch.where(part["known"] < 0, tokens[:, 0], part["known"])
        places.lengths[at] = part["end"].int()
        places.emitted[at] = part["emitted"].int()
        places.newest[at] = newest
        if self.drafting is not None:
            self._draft(part, consumed, newest, size, tree)
        return pack_step_output(tokens, consumed.tops, torch.zeros_like(newest))

    def _draft(
        self, part: dict[str, Any], consumed: Consumed, newest: Tensor, size: Size, tree: DraftShape
    ) -> None:
        """Drafts of a chunk that does not end its prompt are nonsense, and overwritten before anybody reads them."""
        drafting, places, at, last = self.drafting, self.places, part["place"], part["wide_last"]
        assert drafting is not None
        source, ids = part["source"], part["next_ids"]
        ids = torch.where(ids < 0, newest[part["wide_owner"].clamp(min=0)], ids)
        mask = (source == MASK)[:, None]
        hidden = torch.where(
            mask, drafting.mask_hidden, drafting.fc(consumed.hidden)[source.clamp(min=0)]
        )
        embeds = torch.where(mask, drafting.mask_embedding, drafting.drafter.embed(ids))
        rows = self._rows(part, consumed.tables, size.most + size.masks, "wide_", places.ends[at])
        rows.bidirectional_rows = drafting.both(tree.k)
        normed, stream = drafting.lean.forward(embeds, hidden, rows, self.memory)
        k = tree.k
        if not k:
            return
        if drafting.parallel:
            last = (
                (last[:, None] + torch.arange(k, device=last.device))
                .clamp(max=size.wide - 1)
                .flatten()
            )
        first = (part["end"] - 1).int()
        verified = Verified(
            ids[:0],
            consumed.hidden,
            first,
            torch.zeros_like(first),
            newest,
            consumed.tables,
            places.ends[at],
        )
        drafting.look_ahead(normed, stream, last, verified, tree, at, places.trees)

    def _rows(
        self, part: dict[str, Any], tables: Tensor, most: int, kind: str, ends: Tensor | None = None
    ) -> RowPass:
        positions, owner = part[f"{kind}positions"], part[f"{kind}owner"]
        whose, page = owner.clamp(min=0), self.places.page
        stored = owner >= 0
        if ends is not None:
            stored &= positions < ends[whose]
        slots = torch.where(
            stored, tables[whose, positions // page].long() * page + positions % page, -1
        )
        start, count = part[f"{kind}start"].int(), part[f"{kind}count"].int()
        return RowPass(positions, slots, tables, start, count, part["first"].int(), most, page)

    def size(self, chunks: list[PrefillChunk], k: int, graphs: bool) -> Size:
        """As large as it must be; for graphs, the next size there is one for."""
        counts = [chunk.end - chunk.start for chunk in chunks]
        rows, requests, most = sum(counts), len(chunks), max(counts)
        if graphs and self.small(rows, requests):
            rows = next(size for size in ROWS if size >= rows)
            most = rows if most > MOST else min(rows, MOST)
            requests = next(size for size in REQUESTS if size >= requests)
        return Size(rows, requests, self.masks(k), most, self.everywhere)

    def masks(self, k: int) -> int:
        """Mask rows behind a prompt."""
        return max(k - 1, 0) if self.drafting is not None and self.drafting.parallel else 0

    @property
    def everywhere(self) -> bool:
        """The last rows of each request see each other: so they must be mask rows in every chunk."""
        return self.drafting is not None and self.drafting.drafter.config.bidirectional

    @torch.inference_mode()
    def capture(self, most: int, tree: DraftShape) -> None:
        """The graphs of usual sizes: up to `most` requests of 32 to 512 tokens each."""
        for requests, rows in itertools.product(REQUESTS, ROWS):
            if requests < 2 * most and 32 * requests <= rows <= min(512 * requests, self.largest):
                size = Size(rows, requests, self.masks(tree.k), min(rows, MOST), self.everywhere)
                vector = self._upload(numbers_of([], [], size, self.places.count), size, True)
                self._capture(size, views_of(vector, size), tree)

    def _upload(self, numbers: list[int], size: Size, graphs: bool) -> Tensor:
        """To the vector of that size, which graphs read; without, a new one."""
        new = self.places.upload(numbers)
        if not graphs or not self.small(size.rows, size.requests):
            return new
        if size not in self.vectors:
            self.vectors[size] = torch.empty_like(new)
        return self.vectors[size].copy_(new, non_blocking=True)

    def _capture(self, size: Size, part: dict[str, Any], tree: DraftShape) -> None:
        """Warm-ups do the work itself, twice: it comes to the same. They need no state, but leave it as it will be."""
        if ("seat", size, tree) in self.graphs:
            return
        self.graphs.warm(lambda: self.seat(part, self.consume(part, size), size, tree))
        consumed = ("consume", size)
        if self.graphs.capture(consumed, lambda: self.consume(part, size)):
            self.graphs.capture(
                ("seat", size, tree),
                lambda: self.seat(part, self.graphs.outputs[consumed], size, tree),
            )

    def small(self, rows: int, requests: int) -> bool:
        """Is there a graph for so many?"""
        return rows <= self.largest and requests <= REQUESTS[-1]
