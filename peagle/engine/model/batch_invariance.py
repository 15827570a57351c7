"""Batch invariance: the bits of a row depend on its own history alone.

Exact mode runs batches with kernels that sum in an order fixed by the row: those of
kernels/triton/batch_invariant on a GPU, those in C on a CPU. A probe shows it for the target and
the machine, bit by bit. Requests of random tokens run in two ways:

    together    all prompts in one pass, then blocks of drafts of all requests, then trees
    alone       prompts in pieces, one request at a time, then row after row

Keys, values and logits must be equal, and so must the softmax of rows together and alone. Prefix
caching, chunked prompts and preemption are exact for the same reason: a row may come from any pass.
One more request has a long context of random keys and values instead of a prompt, behind which its
drafts run.

Engines that share a target may share a successful probe of the C kernels. On a GPU they do not:
every verifier chooses products of the vendor's library for itself.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from peagle.draft_shape import DraftShape
from peagle.engine.kv.kv_cache import KVCache
from peagle.engine.model.fused_llama import FusedLlamaTarget
from peagle.engine.model.verifier import Verifier, target_kv_shapes
from peagle.engine.model.verifier_probe import describe_target
from peagle.engine.sampling.row_softmax import log_softmax, softmax
from peagle.kernels.row_pass import RowPass
from peagle.kernels.triton.batch_invariant.vendor_gemm import ROW_COUNTS, VendorRows
from peagle.kernels.triton.launch.compile_ahead import compile_ahead
from peagle.target import Target

# Within a block of 64 keys, and just before the ends of two: drafts lie across them.
PROMPT_LENGTHS = (11, 60, 125)
LONG_CONTEXT = 1021  # More blocks of keys than splits; drafts lie across the end of one.
PIECES = (3, 1, 16, 8, 65, 2)  # rows of the passes over a prompt alone, in turn
MIN_BLOCK = 8  # rows of a chain, at least
REPEATS = 18  # of all requests in one pass: hundreds of rows
TABLE_ALIGNMENT = 16  # pages: Triton compiles the kernels that a long page table needs
PROBED_LEAVES = 3  # of each tree


@dataclass(frozen=True, slots=True)
class InvarianceProof:
    """A successful probe: what decides which kernels run, for one target."""

    dtype: torch.dtype
    int8: bool
    page_size: int
    shape: DraftShape  # the largest draft

    def covers(self, other: "InvarianceProof") -> bool:
        """Whether an engine that needs `other` needs no probe of its own.

        An engine drafts up to its largest shape, and its probe stands for all smaller ones. So it
        does in another engine. A chain says nothing about trees.
        """
        if (self.dtype, self.int8, self.page_size) != (other.dtype, other.int8, other.page_size):
            return False
        if chain_rows(other.shape) > chain_rows(self.shape):
            return False
        if other.shape.is_chain:
            return True
        fits = other.shape.k <= self.shape.k and other.shape.nodes <= self.shape.nodes
        return fits and not self.shape.is_chain


def chain_rows(shape: DraftShape) -> int:
    """Rows of the chains that are probed for engines with this largest draft."""
    return max(MIN_BLOCK, shape.k + 1)


# Of the C kernels, in this process.
_proofs: WeakKeyDictionary[Target, set[InvarianceProof]] = WeakKeyDictionary()


def enable_batch_invariance(
    verifier: Verifier,
    target: Target,
    page_size: int,
    shape: DraftShape,
    reuse_proof: bool = False,
) -> str | None:
    """Use batch-invariant kernels from now on.

    `shape`: the largest draft. `reuse_proof`: skip the probe if one of another engine covers it.
    Returns None, or the reason why it is not possible; the verifier is then as before.
    """
    if not isinstance(verifier, FusedLlamaTarget):
        return "its layers run through transformers, whose kernels depend on the number of rows"
    reason = verifier.use_batch_invariant()
    if reason is not None:
        return reason
    proof = InvarianceProof(target.dtype, verifier.int8, page_size, shape)
    known = _proofs.setdefault(target, set())
    if reuse_proof and verifier.uses_c_kernels and any(x.covers(proof) for x in tuple(known)):
        return None
    reason = InvarianceProbe(verifier, target, page_size, shape).difference()
    if reason is not None:
        verifier.use_batch_invariant(False)
    elif verifier.uses_c_kernels:
        known.add(proof)
    return reason


def launch_invariant_passes(
    verifier: FusedLlamaTarget, target: Target, page_size: int, shape: DraftShape
) -> None:
    """Launch what `enable_batch_invariance` does, so that its kernels are compiled earlier."""
    with verifier.assumed_batch_invariant() as supported:
        if supported:
            VendorRows().launch_trials(verifier.plain_products(), max(ROW_COUNTS))
            InvarianceProbe(verifier, target, page_size, shape).run_all()


@dataclass(frozen=True, slots=True)
class ProbeTree:
    """The same tree for all requests; row 0 is the newest token."""

    depths: list[int]
    masks: list[int]

    @classmethod
    def grow(cls, shape: DraftShape) -> "ProbeTree":
        """A random tree with so many nodes, no deeper than K."""
        chance = random.Random(0)
        depths, masks = [0], [1]
        for row in range(1, shape.nodes + 1):
            parent = chance.choice([i for i in range(row) if depths[i] < shape.k])
            depths.append(depths[parent] + 1)
            masks.append(masks[parent] | 1 << row)
        return cls(depths, masks)

    def path(self, row: int) -> list[int]:
        """The rows from the root to this one."""
        return [i for i in range(row + 1) if self.masks[row] >> i & 1]

    @property
    def deepest(self) -> list[int]:
        return sorted(range(len(self.depths)), key=lambda row: -self.depths[row])[:PROBED_LEAVES]


class ProbeCache:
    """The KV cache of all requests, each with pages of its own."""

    def __init__(self, target: Target, lengths: Sequence[int], page_size: int) -> None:
        """`lengths`: positions of each request."""
        self.page_size = page_size
        counts = [-(-length // page_size) for length in lengths]
        self.first_pages = [sum(counts[:i]) for i in range(len(counts))]
        device = target.device
        self.kv_cache = KVCache(target_kv_shapes(target), sum(counts), page_size, device)
        width = -(-max(counts) // TABLE_ALIGNMENT) * TABLE_ALIGNMENT
        tables = torch.zeros(len(counts), width, dtype=torch.int32)
        for table, first, count in zip(tables, self.first_pages, counts, strict=True):
            table[:count] = torch.arange(first, first + count)
        self.tables = tables.to(device)

    def rows(
        self, requests: Sequence[int], firsts: Sequence[int], counts: Sequence[int]
    ) -> RowPass:
        """`counts` rows of each request from position `firsts` on.

        A request that occurs again stores nothing: its rows compute the same.
        """
        tables = self.tables[list(requests)]
        device = tables.device
        numbers = torch.tensor(counts, device=device)
        starts = numbers.cumsum(0) - numbers
        owner = torch.arange(len(counts), device=device).repeat_interleave(numbers)
        first = torch.tensor(firsts, device=device)
        positions = first[owner] + torch.arange(len(owner), device=device) - starts[owner]
        pages = tables[owner, positions // self.page_size].long()
        slots = pages * self.page_size + positions % self.page_size
        seen = [i for i, request in enumerate(requests) if request in requests[:i]]
        repeated = torch.zeros(len(counts), dtype=torch.bool, device=device)
        repeated[seen] = True
        return RowPass(
            positions,
            torch.where(repeated[owner], -1, slots),
            tables,
            starts.int(),
            numbers.int(),
            first.int(),
            max(counts),
            self.page_size,
            reads_new_keys=bool(seen),
        )

    def stored(self, request: int, length: int) -> list[Tensor]:
        """The keys and values of a request's first positions."""
        start = self.first_pages[request] * self.page_size
        caches = (*self.kv_cache.keys, *self.kv_cache.values)
        return [cache[start : start + length] for cache in caches]


class InvarianceProbe:
    def __init__(
        self, verifier: Verifier, target: Target, page_size: int, shape: DraftShape
    ) -> None:
        self.verifier = verifier
        self.target = target
        # What kernels depend on.
        self.description = f"invariance {describe_target(target)} {page_size} {shape}"
        self.block = chain_rows(shape)
        self.tree = None if shape.is_chain else ProbeTree.grow(shape)
        room = max(self.block, shape.nodes + 1)
        most = target.context - room
        # Of the contexts: prompts, and behind them the long one, where the target allows it.
        self.lengths = sorted({max(min(length, most), 1) for length in PROMPT_LENGTHS})
        self.prompts = range(len(self.lengths))
        if most > max(self.lengths):
            self.lengths.append(min(LONG_CONTEXT, most))
        self.requests = range(len(self.lengths))
        positions = [length + room for length in self.lengths]
        self.together, self.alone = (ProbeCache(target, positions, page_size) for _ in range(2))
        generator = torch.Generator().manual_seed(0)
        size = (len(self.lengths), max(positions))
        self.ids = torch.randint(target.vocab_size, size, generator=generator).to(target.device)
        for request in self.requests[len(self.prompts) :]:
            self._fill_context(request)

    def _fill_context(self, request: int) -> None:
        """The same random keys and values in both caches."""
        length = self.lengths[request]
        generator = torch.Generator(self.ids.device).manual_seed(0)
        caches = (cache.stored(request, length) for cache in (self.together, self.alone))
        for a, b in zip(*caches, strict=True):
            a.copy_(torch.randn(a.shape, generator=generator, device=a.device))
            b.copy_(a)

    @torch.inference_mode()
    def difference(self) -> str | None:
        """What changes the bits of a row here; None: nothing does."""
        compile_ahead(self.run_all, self.target.device, self.description)
        for what, check in self._checks():
            if not check():
                return f"on this machine, {what} changes its results"
        return None

    def run_all(self) -> None:
        """Launch all kernels of the checks."""
        self._prompts_agree()
        self._chains_agree(rows=1)
        self._trees_agree()

    def _checks(self) -> tuple[tuple[str, Callable[[], bool]], ...]:
        return (
            ("the division of prompts into passes", self._prompts_agree),
            ("the number of rows of a chain, or the batch", self._chains_agree),
            ("a tree", self._trees_agree),
            ("the number of rows of a softmax", self._probabilities_agree),
        )

    def _forward(self, cache: ProbeCache, ids: Tensor, rows: RowPass) -> Tensor:
        return self.verifier.forward(ids, rows, cache.kv_cache)[0]

    def _prompts_agree(self) -> bool:
        """All prompts in one pass, and each in pieces."""
        requests = self.prompts
        lengths = self.lengths[: len(requests)]
        rows = self.together.rows(requests, [0] * len(requests), lengths)
        ids = torch.cat([self.ids[r, : lengths[r]] for r in requests])
        last = torch.tensor(lengths, device=ids.device).cumsum(0) - 1
        logits = self.verifier.forward(ids, rows, self.together.kv_cache, last)[0]
        for request in requests:
            alone = self._read_in_pieces(request)
            length = lengths[request]
            pairs = zip(
                self.together.stored(request, length),
                self.alone.stored(request, length),
                strict=True,
            )
            if not torch.equal(logits[request], alone):
                return False
            if not all(torch.equal(a, b) for a, b in pairs):
                return False
        return True

    def _read_in_pieces(self, request: int) -> Tensor:
        """The logits of the last row of a prompt."""
        done = 0
        turn = 0
        logits = self.ids.new_zeros(1)
        while done < self.lengths[request]:
            count = min(PIECES[turn % len(PIECES)], self.lengths[request] - done)
            rows = self.alone.rows([request], [done], [count])
            ids = self.ids[request, done : done + count]
            logits = self._forward(self.alone, ids, rows)[-1]
            done += count
            turn += 1
        return logits

    def _chains_agree(self, rows: int | None = None) -> bool:
        """Blocks of all requests, and of many of each, against single rows.

        `rows`: how many of a block are compared; None: all.
        """
        requests = self.requests
        compared = rows or self.block
        blocks = []
        for repeats in (1, REPEATS):
            batch = [*requests] * repeats
            firsts = [self.lengths[r] for r in batch]
            block_rows = self.together.rows(batch, firsts, [self.block] * len(batch))
            ids = torch.cat([self._block_ids(r) for r in batch])
            logits = self._forward(self.together, ids, block_rows)
            blocks.append(logits.unflatten(0, (repeats, len(requests), self.block)))
        singles = [[self._single(r, i) for i in range(compared)] for r in requests]
        expected = torch.stack([torch.stack(logits) for logits in singles])
        return all(torch.equal(part[:, :compared], expected) for block in blocks for part in block)

    def _block_ids(self, request: int) -> Tensor:
        first = self.lengths[request]
        return self.ids[request, first : first + self.block]

    def _single(self, request: int, index: int) -> Tensor:
        """The logits of one row behind the prompt, in a pass of its own."""
        position = self.lengths[request] + index
        rows = self.alone.rows([request], [position], [1])
        return self._forward(self.alone, self.ids[request, position : position + 1], rows)[0]

    def _trees_agree(self) -> bool:
        """Trees of all requests, and of each alone; some of their paths against chains."""
        if self.tree is None:
            return True
        together = self._tree_logits(self.tree, self.requests)
        for request in self.requests:
            alone = self._tree_logits(self.tree, [request])[0]
            if not torch.equal(alone, together[request]):
                return False
            for leaf in self.tree.deepest:
                path = self.tree.path(leaf)
                rows = self.alone.rows([request], [self.lengths[request]], [len(path)])
                chain = self._forward(self.alone, self._tree_ids(request)[path], rows)
                if not torch.equal(chain, alone[path]):
                    return False
        return True

    def _tree_logits(self, tree: ProbeTree, requests: Sequence[int]) -> Tensor:
        """The logits [requests, rows, V] of the same tree for each of these requests."""
        lengths = [self.lengths[r] for r in requests]
        rows = self.together.rows(requests, lengths, [len(tree.depths)] * len(requests))
        depths, masks = (torch.tensor(x, device=self.ids.device) for x in (tree.depths, tree.masks))
        rows.positions = rows.first_positions.long()[:, None].add(depths).flatten()
        rows.tree_masks = masks.repeat(len(requests))
        rows.tree_depth = max(tree.depths)
        ids = torch.stack([self._tree_ids(r) for r in requests])  # [requests, rows]
        return self._forward(self.together, ids.flatten(), rows).unflatten(0, ids.shape)

    def _probabilities_agree(self) -> bool:
        """What sampling and log-probabilities read: rows together, and each alone."""
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(REPEATS, self.target.vocab_size, generator=generator)
        logits = logits.to(self.ids.device)
        alone = [logits[i : i + 1].clone() for i in range(REPEATS)]
        return all(
            torch.equal(compute(logits), torch.cat([compute(row) for row in alone]))
            for compute in (softmax, log_softmax)
        )

    def _tree_ids(self, request: int) -> Tensor:
        first = self.lengths[request]
        assert self.tree is not None
        return self.ids[request, first : first + len(self.tree.depths)]
