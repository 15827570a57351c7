"""The engine: many requests at once, joining and leaving at every step.

    add -> queue -> plan (scheduler) -> prefill, decode (stepper, on the device) -> read back -> pieces -> stream

A thread runs round after round (rounds.py); with `thread=False` whoever holds the engine runs `step()` himself.
"""

import itertools
import threading
from dataclasses import replace
from typing import Any

import torch

from peagle.catalog import DEFAULT_PAIR
from peagle.core import Method, Sampling, parse_method
from peagle.draft_shape import MAX_ADAPTIVE_K, MAX_ADAPTIVE_K_PARALLEL, DraftShape
from peagle.drafter import Drafter
from peagle.engine.detokenizer import Detokenizer, token_decoder
from peagle.engine.kv.page_allocator import PageAllocator
from peagle.engine.loop import EngineLoop, RequestState
from peagle.engine.model.exactness import exact_multiple
from peagle.engine.policy.adaptive import AdaptivePolicy, FixedPolicy, candidate_shapes
from peagle.engine.sampling.grammar_masks import GrammarState
from peagle.engine.sampling.sampling_state import check_bias
from peagle.engine.schedule.request import Request, RequestLimits
from peagle.engine.schedule.scheduler import Scheduler
from peagle.engine.step.stepper import Stepper, kv_shapes
from peagle.engine.stream import Stream
from peagle.errors import UserError
from peagle.grammar import Grammar
from peagle.kernels.cpu.library import kernel_state
from peagle.kernels.cpu.matrix import can_pack
from peagle.model_pair import ModelPair, Prompt, load_models
from peagle.target import Target

PAGE_SIZE = 64  # positions
KV_MEMORY_FRACTION = 0.85  # of what is free on a GPU may become pages
CPU_KV_TOKENS = 1 << 15  # positions of all requests together, on a CPU
MAX_ADAPTIVE_NODES = 31  # of the trees that automatic K may choose


class Engine:
    def __init__(
        self,
        pair: ModelPair | str = DEFAULT_PAIR,
        *,
        method: str | None = None,
        k: int | str = "auto",
        tree: int | None = None,
        max_batch: int = 64,
        context: int | None = None,
        tokens: int | None = None,
        chunk: int | None = None,
        max_queue: int = 1024,
        page: int = PAGE_SIZE,
        exact: bool | None = False,
        int8: bool = False,
        prefix_caching: bool = True,
        graphs: bool = True,
        thread: bool = True,
    ) -> None:
        """`tree`: nodes of a candidate tree. A fixed K has a tree of so many; automatic K one of up to so many, if it
        pays. 0: chains only; None: chains, and for automatic K on a GPU trees of up to 31. Automatic K goes to 7, with
        a parallel drafter on a GPU to 11.

        `tokens`: positions that fit the pages, all requests together; `chunk`: prompt tokens of one step.

        `exact`: passes are per request and bit-equal with and without drafts; None: where float32 is not used and it
        can be had. `int8`: matrices in 8 bits, on a CPU: faster, but the target's distribution is another one.
        """
        pair = load_models(pair) if isinstance(pair, str) else pair
        if int8:
            check_int8(pair.target)
        self.pair, self.target = pair, pair.target
        self.method: Method = parse_method(method or pair.pair.method)
        drafter = None if self.method == "none" else pair.drafter(self.method)
        gpu = self.target.device.type == "cuda"
        if (
            tree is None
            and k == "auto"
            and gpu
            and not exact
            and drafter is not None
            and supports_trees(drafter)
        ):
            tree = MAX_ADAPTIVE_NODES
        self.k_most = (
            0 if drafter is None else largest_k(k, tree or 0, pair, gpu and supports_trees(drafter))
        )
        self.largest = largest_shape(self.k_most, tree or 0, drafter, exact)
        exact = False if exact is None and not self.largest.chain else exact
        self.context = min(context or self.target.context, self.target.context)
        pages = kv_page_count(
            pair, drafter, tokens, page, max_batch, self.context, self.largest.nodes
        )
        if not self.largest.chain and pages * page < 2 * self.largest.nodes:
            raise UserError(
                f"{pages * page} positions hold no tree of {self.largest.nodes} nodes and a prompt: raise --kv-tokens,"
                " or use a smaller --tree"
            )
        self.stepper = build_stepper(
            self.target, drafter, self.largest, pages, page, max_batch, self.context
        )
        self.int8 = int8
        if int8:
            self.stepper.quantize()
        self.weights = "int8" if int8 else self.stepper.weights
        self.exact = self._make_exact(exact, page)
        self.pages = PageAllocator(pages, page, caching=prefix_caching and not self.exact)
        whole = (
            self.context * max_batch
        )  # exact: a prompt is never cut, or its bits would depend on its neighbors
        self.scheduler = Scheduler(
            self.pages,
            max_batch,
            whole if self.exact else chunk or (4096 if gpu else 512),
            max_queue,
            self.context,
            slack=self.largest.nodes,
            reserve=self.exact,
            spare=0 if self.largest.chain else self.largest.nodes,
        )
        nodes = 0 if self.largest.chain else self.largest.nodes
        chooser = (
            FixedPolicy(self.largest)
            if k != "auto" or drafter is None
            else AdaptivePolicy(candidate_shapes(self.k_most, nodes))
        )
        self.rounds = EngineLoop(
            self.stepper, self.scheduler, chooser, self.largest, self.exact, graphs and gpu
        )
        self.lock, self.metrics, self.seats = (
            self.rounds.lock,
            self.rounds.metrics,
            self.rounds.seats,
        )
        self.ids = itertools.count()
        self.decoder = (
            None if self.target.tokenizer is None else token_decoder(self.target.tokenizer)
        )
        self.closed, self.failure = False, None  # type: bool, str | None
        self._thread = (
            threading.Thread(target=self._loop, name="peagle-engine", daemon=True)
            if thread
            else None
        )
        if self._thread is not None:
            self._thread.start()

    def add(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 128,
        min_tokens: int = 0,
        stop: tuple[str, ...] = (),
        stop_ids: frozenset[int] = frozenset(),
        ignore_eos: bool = False,
        logprobs: int | None = None,
        user: str = "",
        id: str | None = None,
        raw: bool = False,
        include_stop: bool = False,
        grammar: Grammar | None = None,
        **sampling: Any,
    ) -> Stream:
        """Queues a request; its answer comes through the stream, and keeps to the grammar where there is one.

        `sampling`: the fields of core.Sampling.
        """
        if grammar is not None and ignore_eos:
            raise UserError(
                "ignore_eos does not go with a grammar: an answer ends where its grammar does"
            )
        settings = Sampling(**sampling).seeded()
        ids = list(self.pair.encode(prompt, raw))
        limits = RequestLimits(
            max_tokens, min_tokens, tuple(stop), frozenset(stop_ids), ignore_eos, logprobs
        )
        room = max(self.context - len(ids), 1)  # an answer ends with the context
        limits = replace(limits, max_tokens=min(max_tokens, room), min_tokens=min(min_tokens, room))
        vocabulary = self.target.vocab_size
        if bad := [token for token in ids if not 0 <= token < vocabulary]:
            raise UserError(
                f"token ids {bad[:5]} are outside the target's vocabulary of {vocabulary}"
            )
        check_bias(settings, vocabulary)
        words = Detokenizer(self.decoder, limits.stop, include_stop, limits.min_tokens)
        stops = limits.stop_ids | (frozenset() if ignore_eos else self.target.stop_ids)
        binding = (
            None
            if grammar is None
            else GrammarState(self.pair.grammars, grammar, stops, limits.min_tokens)
        )
        with self.lock:
            self._require_open()
            request = Request(id or f"r{next(self.ids)}", ids, settings, limits, user)
            self.scheduler.add(request)
            stream = Stream(request.id, len(ids), self.abort)
            self.seats[request.id] = RequestState(stream, words, stops, binding)
            self.metrics.prompt_tokens += len(ids)
            self.lock.notify_all()
        return stream

    def abort(self, id: str) -> None:
        """Gives a request up; one that is not there (any more) is none of our business."""
        with self.lock:
            request = self.scheduler.live.get(id)
            if request is not None:
                self.rounds.finish(request, "abort")

    def step(self) -> bool:
        """One round of the loop. False: there was nothing to do."""
        self._require_open()
        return self.rounds.run()

    def form(self, nodes: int) -> DraftShape:
        """That has so many: a chain, where one is as long."""
        return DraftShape(nodes, nodes) if nodes <= self.k_most else DraftShape(self.k_most, nodes)

    def warm_up(self) -> None:
        """Before the first request: kernels are compiled, graphs captured."""
        self.rounds.warm_up()

    def drain(self) -> None:
        """Runs until every request is answered; for engines without a thread."""
        while self.step():
            pass

    def close(self) -> None:
        """Fails what is not answered yet."""
        with self.lock:
            if self.closed:
                return
            self.closed = True
            self.rounds.fail_all(self.failure or "the engine was closed")
            self.lock.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check_integrity(self) -> None:
        with self.lock:
            self.scheduler.check_integrity()
            assert self.seats.keys() == self.scheduler.live.keys(), (
                "a seat without a request, or the other way round"
            )
            taken = [seat.place for seat in self.seats.values() if seat.place is not None]
            assert len(taken) == len(set(taken)) == self.stepper.places.taken, (
                "a place is lost, or taken twice"
            )
            assert self.metrics.finished.total() + len(self.scheduler.live) == self.scheduler.added

    def status(self) -> dict[str, Any]:
        """Counters and gauges, for people and for /metrics."""
        with self.lock:
            pages, scheduler = self.pages, self.scheduler
            return self.metrics.as_dict() | {
                "waiting": len(scheduler.waiting),
                "running": len(scheduler.running),
                "kv_usage": 1 - pages.free / pages.count,
                "preemptions": scheduler.preemptions,
                "method": self.method,
                "exact": self.exact,
                "int8": self.int8,
                "weights": self.weights,
                "kernels": "triton" if self.target.device.type == "cuda" else kernel_state(),
            }

    # --- the loop -----------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        while True:
            with self.lock:
                while not self.closed and not self.scheduler.live and not self.rounds.flights:
                    self.lock.wait()
                if self.closed:
                    return
            try:
                self.step()
            except Exception as error:  # whoever waits must be told
                with self.lock:
                    if not self.closed:
                        self.failure = f"the engine stopped: {type(error).__name__}: {error}"
                        self.closed = True
                        self.rounds.fail_all(self.failure)
                return

    def _require_open(self) -> None:
        if self.closed:
            raise UserError(self.failure or "the engine is closed: make a new one")

    # --- set-up -------------------------------------------------------------------------------------------------------

    def _make_exact(self, wanted: bool | None, page: int) -> bool:
        on = self.target.dtype != torch.float32 if wanted is None else wanted
        if not on:
            return False
        multiple = exact_multiple(self.stepper.verifier, self.target, page, self.k_most)
        if multiple is None and wanted:
            raise UserError(
                f"exact mode cannot be had for {self.target.name!r} here: rows depend on their neighbors"
                " (as in mixtures of experts). Use --no-exact --dtype float32: a near tie is unlikely there"
            )
        self.stepper.multiple = multiple or 1
        return multiple is not None


def check_int8(target: Target) -> None:
    if target.device.type != "cpu":
        raise UserError(
            f"int8 is for a CPU, and the target is on {target.device.type}: leave it out, or --device cpu"
        )
    if target.dtype != torch.bfloat16:
        name = str(target.dtype).removeprefix("torch.")
        raise UserError(
            f"int8 multiplies bfloat16, and the target is in {name}: leave it out, or --dtype bfloat16"
        )
    if not can_pack(target.lm_head):
        reason = (
            "this CPU has no dot products of bf16 (avx512_bf16)"
            if kernel_state() == "c"
            else kernel_state()
        )
        raise UserError(f"int8 needs the C kernels ({reason}): leave it out")


def largest_k(k: int | str, tree: int, pair: ModelPair, deep: bool) -> int:
    """`deep`: rows are nearly free."""
    if k == "auto":
        most = max(MAX_ADAPTIVE_K_PARALLEL if deep else MAX_ADAPTIVE_K, pair.pair.k)
        return min(most, max(tree - 1, MAX_ADAPTIVE_K)) if tree else most
    if isinstance(k, int) and k >= 1:
        return k
    raise UserError(f"K is {k!r}: use a number of 1 or more, or auto")


def supports_trees(drafter: Drafter) -> bool:
    """Trees come from one parallel pass."""
    return drafter.config.method == "p-eagle"


def largest_shape(k: int, tree: int, drafter: Drafter | None, exact: bool | None) -> DraftShape:
    if not tree or drafter is None:
        return DraftShape(k, k)
    if not supports_trees(drafter):
        raise UserError(
            "eagle3 drafts one token after another: trees need a p-eagle drafter. Leave out --tree"
        )
    if exact:
        raise UserError("exact mode verifies chains: leave out one of --exact and --tree")
    return DraftShape(k, tree)


def kv_page_count(
    pair: ModelPair,
    drafter: Any,
    tokens: int | None,
    page: int,
    batch: int,
    context: int,
    nodes: int,
) -> int:
    """As many as asked for; else what a GPU has room for, or a modest number on a CPU; never more than can be used."""
    most = batch * -(-(context + nodes + 1) // page)
    if tokens is not None:
        return max(1, min(most, -(-tokens // page)))
    target = pair.target
    if target.device.type != "cuda":
        return min(most, -(-max(CPU_KV_TOKENS, context + nodes) // page))
    each = sum(shape.bytes for shape in kv_shapes(target, drafter)) * page
    free, _ = torch.cuda.mem_get_info(target.device)
    return max(1, min(most, int(free * KV_MEMORY_FRACTION) // each))


def build_stepper(
    target: Any, drafter: Any, largest: DraftShape, pages: int, page: int, batch: int, context: int
) -> Stepper:
    try:
        return Stepper(target, drafter, largest, pages, page, batch, context)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if "memory" not in str(error).lower():
            raise
        raise UserError(
            f"{pages * page:,} positions of keys and values do not fit the memory: lower --kv-tokens, --max-batch or"
            " --context"
        ) from error
