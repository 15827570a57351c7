"""One step of a batch, on the device from end to end: verify -> accept -> draft. And prefills, piece by piece.

The host says which places take part and how many drafts to verify and to make; everything else is in `Places`. On a GPU
a step is two CUDA graphs, per size of the batch and K: up to the target's tokens, and from them to the next drafts;
between the two, logits are processed where a request wants more than the likeliest token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from peagle.drafter import Drafter
from peagle.engine.drafting import Drafting, Verified
from peagle.engine.exactness import filled
from peagle.engine.memory import Memory, Shape
from peagle.engine.places import Places
from peagle.engine.processing import Logprobs, Processing, broken, logprobs
from peagle.engine.rowpass import RowPass
from peagle.engine.scheduler import Chunk
from peagle.engine.verifier import cache_shapes, verifier_for
from peagle.kernels.accept import accept
from peagle.target import Target

LONG, PROGRAMS, SPLITS = 1024, 132, 8  # keys; programs that keep a GPU busy; shares of long contexts
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


@dataclass(slots=True)
class Result:
    """What a pass says, on the device: [B, R + 2], the target's tokens, how many drafts were kept, and whether logits
    are broken. The first kept + 1 tokens are new."""

    packed: Tensor
    logprobs: Logprobs | None = None


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
        self.target, self.k, self.context = target, k if drafter else 0, context
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
        self.graphs: dict[tuple[Any, ...], Any] = {}
        self.outputs: dict[tuple[Any, ...], Any] = {}
        self.inputs: dict[int, Tensor] = {}

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
        block: Block = self._run(("verify", batch, k, splits), lambda: self.verify(index, k, splits))
        logits, tokens = block.logits[:count], block.tokens[:count]
        if processing is not None:
            tokens.copy_(processing.choose(logits, block.ids[:count, 1:], self.places.emitted[index[:count]]))
        packed = self._run(("settle", batch, k, k_next, splits), lambda: self.settle(index, block, k_next))[:count]
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
        return Block(rows, ids, hidden, logits, logits.argmax(-1), places.ends[index])

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

    @torch.inference_mode()
    def prefill(
        self, chunks: list[Chunk], at: list[int], k_next: int, processing: Processing | None, top: int | None = None
    ) -> Result | None:
        """Consumes the chunks. `processing` and the result are of those that end a prompt without an answer yet."""
        layout = Layout.of(chunks, self.places.page)
        places, index = self.places, self._index(at, len(at))
        up = places.upload
        rows = layout.rows(up, places.tables[index])
        ends = [chunk.end - chunk.start for chunk in chunks]
        lasts = [sum(ends[: i + 1]) - 1 for i in range(len(ends))]
        fresh = [i for i, chunk in enumerate(chunks) if chunk.next_id is None]
        keep = up([lasts[i] for i in fresh] or [0], torch.long)
        logits, hidden = self.verifier.forward(up(layout.ids, torch.long), rows, self.memory, keep)
        newest = up([chunk.next_id or 0 for chunk in chunks], torch.long)
        result = None
        if fresh:
            logits = logits[:, None]  # [fresh, 1, vocabulary]
            tokens = logits.argmax(-1)
            nothing = torch.zeros(len(fresh), dtype=torch.int32, device=places.device)
            if processing is not None:
                tokens = processing.choose(logits, tokens[:, :0], nothing)
                processing.commit(tokens, nothing)
            newest[up(fresh, torch.long)] = tokens[:, 0]
            packed = torch.cat([tokens, nothing[:, None], broken(logits)[:, None]], 1)
            result = Result(packed, None if top is None else logprobs(logits, tokens, top))
        self._seat(chunks, index, newest)
        if self.drafting is not None:
            self._draft_prefill(layout, chunks, index, hidden, newest, k_next)
        return result

    def _seat(self, chunks: list[Chunk], index: Tensor, newest: Tensor) -> None:
        """The state of the places behind their chunks."""
        places, up = self.places, self.places.upload
        places.lengths[index] = up([chunk.end for chunk in chunks], torch.int32)
        places.emitted[index] = up([max(1, len(chunk.request.output)) for chunk in chunks], torch.int32)
        places.newest[index] = newest

    def _draft_prefill(
        self, layout: "Layout", chunks: list[Chunk], index: Tensor, hidden: Tensor, newest: Tensor, k: int
    ) -> None:
        """The drafter's rows of the chunks, ids shifted by one; drafts for those that come to their end."""
        drafting, places, up = self.drafting, self.places, self.places.upload
        assert drafting is not None
        masks = max(k - 1, 0) if drafting.parallel else 0
        wide = layout.shifted([masks if chunk.end == chunk.request.goal else 0 for chunk in chunks])
        ids = up(wide.ids, torch.long)
        lasts = up(wide.lasts, torch.long)
        ids[lasts] = newest
        source = up(wide.source, torch.long)  # -1: a mask row
        fused = drafting.drafter.fuse(hidden)
        mask = source < 0
        stream = torch.where(mask[:, None], drafting.mask_hidden, fused[source.clamp(min=0)])
        embeds = torch.where(mask[:, None], drafting.mask_embedding, drafting.drafter.embed(ids))
        tables = places.tables[index]
        rows = wide.rows(up, tables, places.ends[index])
        out = drafting.lean.forward(embeds, stream, rows, self.memory)
        final = [i for i, chunk in enumerate(chunks) if chunk.end == chunk.request.goal]
        if not final or not k:
            return
        who = up(final, torch.long)
        if drafting.parallel:
            sampled = lasts[who][:, None] + torch.arange(k, device=places.device)
            drafts = drafting.best(out[sampled.flatten()])[0].view(-1, k)
        else:
            first = up([chunks[i].end - 1 for i in final], torch.int32)
            verified = Verified(
                ids[:0], hidden, first, torch.zeros_like(first), newest[who], tables[who], places.ends[index][who]
            )
            drafts = drafting.chain(out[lasts[who]], verified, k)
        places.drafts[index[who], :k] = drafts

    def _index(self, at: list[int], batch: int) -> Tensor:
        """The places of a batch, filled up with the one that is nobody's; one tensor per size, for the graphs."""
        filled = at + [self.places.count] * (batch - len(at))
        new = self.places.upload(filled, torch.long)
        if self.places.device.type != "cuda":
            return new
        if batch not in self.inputs:
            self.inputs[batch] = new.clone()
        return self.inputs[batch].copy_(new, non_blocking=True)

    def _run(self, key: tuple[Any, ...], work: Callable[[], Any]) -> Any:
        """Replays the graph of this key where there is one."""
        graph = self.graphs.get(key)
        if graph is None:
            return work()
        graph.replay()
        return self.outputs[key]

    def force(self, conditional: list[float]) -> None:
        """For measurements: from now on draft i is right with this probability, given that those before it were."""
        self.forced = torch.tensor(conditional, device=self.places.device)

    def _force(self, block: Block) -> None:
        assert self.forced is not None
        drafts = block.ids[:, 1:]
        right = torch.rand(drafts.shape, device=drafts.device) < self.forced[: drafts.shape[1]]
        block.tokens[:, :-1] = torch.where(right, drafts, (drafts + 1) % block.logits.shape[-1])

    def split(self, count: int, k: int, repeats: int = 30) -> tuple[float | None, float | None]:
        """Milliseconds of a step's two halves, by their graphs: the target's pass, and acceptance with drafting."""
        batch, spent = bucket(count), []
        for key in (("verify", batch, k, 1), ("settle", batch, k, k, 1)):
            if key not in self.graphs:
                return None, None
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(repeats):
                self.graphs[key].replay()
            end.record()
            end.synchronize()
            spent.append(start.elapsed_time(end) / repeats)
        return spent[0], spent[1]

    def captured(self, count: int, k: int, k_next: int, longest: int = 0) -> bool:
        batch = bucket(count)
        return ("settle", batch, k, k_next, self.splits(batch, longest)) in self.graphs

    @torch.inference_mode()
    def capture(self, count: int, k: int, k_next: int, longest: int = 0) -> bool:
        """Makes the two graphs of a batch size and K. False: this target asks the host in between, and has none."""
        batch = bucket(count)
        splits = self.splits(batch, longest)
        index = self._index([self.places.count] * batch, batch)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.settle(index, self.verify(index, k, splits), k_next)
        torch.cuda.current_stream().wait_stream(stream)
        first, second = ("verify", batch, k, splits), ("settle", batch, k, k_next, splits)
        return self._capture(first, lambda: self.verify(index, k, splits)) and self._capture(
            second, lambda: self.settle(index, self.outputs[first], k_next)
        )

    def _capture(self, key: tuple[Any, ...], work: Callable[[], Any]) -> bool:
        if key in self.graphs:
            return True
        graph = torch.cuda.CUDAGraph()
        pool = next((other.pool() for other in self.graphs.values()), None)
        try:
            with torch.cuda.graph(graph, pool=pool):
                self.outputs[key] = work()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            torch.cuda.synchronize()
            return False
        self.graphs[key] = graph
        return True


@dataclass(slots=True)
class Layout:
    """Rows of several requests side by side, as the host lays them out for a prefill."""

    ids: list[int]
    counts: list[int]
    first: list[int]
    source: list[int]  # the row of the target's pass whose g a row takes; -1: a mask row
    page: int

    @staticmethod
    def of(chunks: list[Chunk], page: int) -> "Layout":
        ids = [token for chunk in chunks for token in chunk.ids]
        counts = [chunk.end - chunk.start for chunk in chunks]
        return Layout(ids, counts, [chunk.start for chunk in chunks], list(range(len(ids))), page)

    @property
    def lasts(self) -> list[int]:
        """The row of each request's last real token."""
        lasts, start, at = [], 0, 0
        for count in self.counts:
            real = sum(source >= 0 for source in self.source[start : start + count])
            lasts.append(start + real - 1)
            start, at = start + count, at + 1
        return lasts

    def shifted(self, masks: list[int]) -> "Layout":
        """The drafter's rows: ids one further (a request's last one is filled in later), then so many mask rows."""
        ids, source, start = [], [], 0
        for count, more in zip(self.counts, masks, strict=True):
            ids += self.ids[start + 1 : start + count] + [0] * (1 + more)
            source += [*range(start, start + count)] + [-1] * more
            start += count
        counts = [count + more for count, more in zip(self.counts, masks, strict=True)]
        return Layout(ids, counts, self.first, source, self.page)

    def rows(self, up: Callable[[Any, torch.dtype], Tensor], tables: Tensor, ends: Tensor | None = None) -> RowPass:
        """tables [B, P]; ends [B]: rows from this position on are not stored."""
        places = [first + i for first, count in zip(self.first, self.counts, strict=True) for i in range(count)]
        owners = [b for b, count in enumerate(self.counts) for _ in range(count)]
        positions, owner = up(places, torch.long), up(owners, torch.long)
        slots = tables[owner, positions // self.page].long() * self.page + positions % self.page
        if ends is not None:
            slots = torch.where(positions < ends[owner], slots, -1)
        starts = [sum(self.counts[:b]) for b in range(len(self.counts))]
        begin, counts, first = (up(x, torch.int32) for x in (starts, self.counts, self.first))
        return RowPass(positions, slots, tables, begin, counts, first, max(self.counts), self.page)


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
