"""The engine: many requests at once, joining and leaving at every step.

    add -> queue -> plan (scheduler) -> prefill, decode (stepper, on the device) -> read back -> pieces -> stream

The loop plans a step, launches it, and reads back the one before: on a GPU the device always has work while the host
thinks; on a CPU there is nothing to overlap, and each step is read back at once. With `thread=False` whoever holds the
engine runs `step()` himself.
"""

import itertools
import secrets
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from peagle.core import Method, Sampling, Step, parse_method
from peagle.engine.adaptive import AdaptiveK, FixedK
from peagle.engine.exactness import exact_multiple
from peagle.engine.history import History
from peagle.engine.metrics import Metrics
from peagle.engine.pages import Pages
from peagle.engine.processing import Logprobs, Processing
from peagle.engine.request import Limits, Reason, Request
from peagle.engine.scheduler import Chunk, Plan, Scheduler
from peagle.engine.stepper import BUCKETS, Stepper, shapes_of
from peagle.engine.stepresult import Result
from peagle.engine.stream import Piece, Stream, TokenLogprob
from peagle.engine.text import Words
from peagle.errors import UserError
from peagle.loaded import LoadedPair, Prompt

PAGE = 64  # positions
MEMORY = 0.85  # of what is free on a GPU may become pages
CPU_TOKENS = 1 << 15  # positions of all requests together, on a CPU
K_LARGEST = 7  # of automatic K


@dataclass(slots=True)
class Seat:
    """What the engine knows of a request beside the scheduler: where it sits, and whom to tell."""

    stream: Stream
    words: Words
    stops: frozenset[int]
    place: int | None = None
    history: History | None = None
    drafted: int = 0  # drafts that wait to be verified
    table: int = 0  # pages the device knows


@dataclass(frozen=True, slots=True)
class Member:
    """A request in a pass that is about to be launched: still right if the request is aborted meanwhile."""

    request: Request
    seat: Seat
    place: int


@dataclass(slots=True)
class Flight:
    """A launched pass whose result is on its way to the host."""

    requests: list[Request]
    packed: Tensor
    logprobs: Logprobs | None
    k: int
    prefill: bool
    event: Any = None
    started: float = 0.0
    timed: bool = False  # its time is that of a decode step with K drafts verified and made, and nothing else


class Engine:
    def __init__(
        self,
        pair: LoadedPair,
        *,
        method: str | None = None,
        k: int | str = "auto",
        max_batch: int = 64,
        context: int | None = None,
        tokens: int | None = None,
        chunk: int | None = None,
        max_queue: int = 1024,
        page: int = PAGE,
        exact: bool | None = False,
        prefix_caching: bool = True,
        graphs: bool = True,
        thread: bool = True,
    ) -> None:
        """`tokens`: positions that fit the pages, all requests together; `chunk`: prompt tokens of one step.

        `exact`: passes are per request and bit-equal with and without drafts; None: where float32 is not used and it
        can be had.
        """
        self.pair, self.target = pair, pair.target
        self.method: Method = parse_method(method or pair.pair.method)
        drafter = None if self.method == "none" else pair.drafter(self.method)
        self.k_most = 0 if drafter is None else largest_k(k, pair)
        self.context = min(context or self.target.context, self.target.context)
        gpu = self.target.device.type == "cuda"
        pages = page_count(pair, drafter, tokens, page, max_batch, self.context, self.k_most)
        self.stepper = build(self.target, drafter, self.k_most, pages, page, max_batch, self.context)
        self.exact = self._make_exact(exact, page)
        self.graphs = graphs and gpu
        self.pages = Pages(pages, page, caching=prefix_caching and not self.exact)
        whole = self.context * max_batch  # exact: a prompt is never cut, or its bits would depend on its neighbours
        self.scheduler = Scheduler(
            self.pages, max_batch, whole if self.exact else chunk or (4096 if gpu else 512), max_queue, self.context,
            slack=self.k_most,
        )  # fmt: skip
        self.chooser = FixedK(self.k_most) if k != "auto" or drafter is None else AdaptiveK(candidates(self.k_most))
        self.metrics = Metrics(k=self.k_most)
        self.lookahead = 1 if gpu else 0
        self.seats: dict[str, Seat] = {}
        self.flights: deque[Flight] = deque()
        self.ids = itertools.count()
        self.lock = threading.Condition()
        self.closed, self.failure = False, None  # type: bool, str | None
        self._processing: tuple[tuple[str, ...], Processing | None] = ((), None)
        self._last_read = 0.0
        self._thread = threading.Thread(target=self._loop, name="peagle-engine", daemon=True) if thread else None
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
        **sampling: Any,
    ) -> Stream:
        """Queues a request; its answer comes through the stream. `sampling`: the fields of core.Sampling."""
        settings = Sampling(**sampling)
        if not settings.greedy and settings.seed is None:
            settings = Sampling(**sampling | {"seed": secrets.randbelow(2**31)})
        ids = list(self.pair.encode(prompt, raw))
        limits = Limits(max_tokens, min_tokens, tuple(stop), frozenset(stop_ids), ignore_eos, logprobs)
        room = max(self.context - len(ids), 1)  # an answer ends with the context
        limits = replace(limits, max_tokens=min(max_tokens, room), min_tokens=min(min_tokens, room))
        if bad := [token for token in ids if not 0 <= token < self.target.vocab_size]:
            raise UserError(f"token ids {bad[:5]} are outside the target's vocabulary of {self.target.vocab_size}")
        check_bias(settings, self.target.vocab_size)
        words = Words(self.target.tokenizer, limits.stop, include_stop, limits.min_tokens)
        stops = limits.stop_ids | (frozenset() if ignore_eos else self.target.stop_ids)
        with self.lock:
            self._require_open()
            request = Request(id or f"r{next(self.ids)}", ids, settings, limits, user)
            self.scheduler.add(request)
            stream = Stream(request.id, len(ids), self.abort)
            self.seats[request.id] = Seat(stream, words, stops)
            self.metrics.prompt_tokens += len(ids)
            self.lock.notify_all()
        return stream

    def abort(self, id: str) -> None:
        """Gives a request up; one that is not there (any more) is none of our business."""
        with self.lock:
            request = self.scheduler.live.get(id)
            if request is not None:
                self._finish(request, "abort")

    def step(self) -> bool:
        """One round of the loop. False: there was nothing to do."""
        with self.lock:
            self._require_open()
            plan = self._plan()
            chunks = [(chunk, self._member(chunk.request)) for chunk in plan.prefill]
            members = [self._member(request) for request in plan.decode]
        for group in [[pair] for pair in chunks] if self.exact else [chunks] if chunks else []:
            self._prefill(group)
        for part in [[member] for member in members] if self.exact else [members] if members else []:
            self._decode(part, alone=not chunks)
        worked = bool(chunks or members)
        while self.flights and (len(self.flights) > self.lookahead or not worked):
            self._read(self.flights.popleft())
            worked = True
        return worked

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
            self._fail_all(self.failure or "the engine was closed")
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
            assert self.seats.keys() == self.scheduler.live.keys(), "a seat without a request, or the other way round"
            taken = [seat.place for seat in self.seats.values() if seat.place is not None]
            assert len(taken) == len(set(taken)) == self.stepper.places.taken, "a place is lost, or taken twice"
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
            }

    # --- the loop -----------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        while True:
            with self.lock:
                while not self.closed and not self.scheduler.live and not self.flights:
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
                        self._fail_all(self.failure)
                return

    def _plan(self) -> Plan:
        plan = self.scheduler.plan(max(self.k_most + 1, 2 * self.k_most))  # the drafter looks further than the target
        for request in plan.preempted:
            self._leave(self.seats[request.id])
        return plan

    def _member(self, request: Request) -> Member:
        """The request at its place, and its pages known to the device."""
        seat, places = self.seats[request.id], self.stepper.places
        if seat.place is None:
            seat.place, seat.table, seat.drafted = places.take(self.pages.count), 0, 0
            end = min(self.scheduler.context, len(request.prompt) + request.limits.max_tokens + self.k_most)
            places.ends[seat.place] = end
            seat.history = History(
                request.sampling, request.prompt, request.limits.max_tokens + self.k_most + 1,
                vocab=self.target.vocab_size, device=self.target.device, min_tokens=request.limits.min_tokens,
                stop_ids=seat.stops, output=request.output,
            )  # fmt: skip
            self.metrics.cached_tokens += request.cached
            self._processing = ((), None)  # a request that comes back has a new history
        if seat.table < len(request.pages):
            shared = request.cached // self.pages.size
            self.stepper.memory.clear(request.pages[max(seat.table, shared) :])
            places.set_table(seat.place, request.pages, seat.table)
            seat.table = len(request.pages)
        return Member(request, seat, seat.place)

    def _prefill(self, chunks: list[tuple[Chunk, Member]]) -> None:
        started = time.perf_counter()
        fresh = [member for chunk, member in chunks if chunk.next_id is None]
        k = self.metrics.k  # as in the last step: a batch verifies what its members have in common
        result = self.stepper.prefilling.run(
            [chunk for chunk, _ in chunks], [member.place for _, member in chunks], k, self._process(fresh),
            self._top(fresh), self.graphs,
        )  # fmt: skip
        with self.lock:
            for chunk, member in chunks:
                member.seat.drafted = k
                if not chunk.request.finished:
                    self.scheduler.prefilled(chunk)
        if result is not None:
            self._launch(result, [member.request for member in fresh], 0, prefill=True)
        self.metrics.prefill_passes += 1
        self.metrics.prefill_seconds += time.perf_counter() - started

    def _decode(self, members: list[Member], alone: bool) -> None:
        """`alone`: no prefill runs in the same round."""
        k = min(member.seat.drafted for member in members)
        choice = self.chooser.choose(len(members))
        self.metrics.k, self.metrics.k_reason = choice.k, choice.reason
        made = k if choice.k <= k else self.k_most  # drafts may be left unused; so there is a graph for every change
        started = time.perf_counter()
        longest = max(member.request.computed + member.request.ahead for member in members) + k + 1
        if self.graphs:
            self._capture(len(members), k, made, longest)
        result = self.stepper.decode(
            [member.place for member in members], k, made, self._process(members), self._top(members), longest
        )
        with self.lock:
            for member in members:
                member.request.ahead += k + 1
                member.seat.drafted = choice.k
        requests = [member.request for member in members]
        self._launch(result, requests, k, started=started, timed=alone and k == choice.k)
        self.metrics.steps += 1
        self.metrics.k_steps[k] += 1

    def _process(self, members: list[Member]) -> Processing | None:
        """None: every request takes the likeliest token and nothing else. Built anew only when the batch changes."""
        histories = [member.seat.history for member in members if member.seat.history is not None]
        if all(history.plain for history in histories):
            return None
        names = tuple(member.request.id for member in members)
        if self._processing[0] != names:
            self._processing = (names, Processing(histories))
        return self._processing[1]

    def _top(self, members: list[Member]) -> int | None:
        """The most log-probabilities that one of them wants; at least the token's own."""
        wanted = [n for member in members if (n := member.request.limits.logprobs) is not None]
        return max(*wanted, 1) if wanted else None

    def _launch(
        self,
        result: Result,
        requests: list[Request],
        k: int,
        prefill: bool = False,
        started: float = 0.0,
        timed: bool = False,
    ) -> None:
        packed, event, logprobs = result.packed, None, result.logprobs
        if packed.is_cuda:
            packed = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True).copy_(packed, non_blocking=True)
            if logprobs is not None:
                logprobs = Logprobs(*(x.to("cpu", non_blocking=True) for x in logprobs))
            event = torch.cuda.Event()
            event.record()
        self.flights.append(Flight(requests, packed, logprobs, k, prefill, event, started, timed))

    def _read(self, flight: Flight) -> None:
        """Waits for a pass and hands out what it says."""
        if flight.event is not None:
            flight.event.synchronize()
        now, accepted = time.perf_counter(), []
        with self.lock:
            for i, (request, row) in enumerate(zip(flight.requests, flight.packed.tolist(), strict=True)):
                *tokens, kept, broken = row
                if not flight.prefill:
                    request.ahead -= flight.k + 1
                if request.finished:
                    continue
                if broken:
                    self._finish(request, "error", "the target's logits are not numbers: its weights or this prompt"
                                 " overflow the dtype. Use float32")  # fmt: skip
                    continue
                self._take(request, tokens[: kept + 1], flight, i, kept)
                accepted.append(kept)
        if not flight.prefill:
            seconds = now - max(flight.started, self._last_read)
            self.metrics.step_seconds += seconds
            if accepted:
                self.chooser.observe(len(flight.requests), flight.k, seconds if flight.timed else None, accepted)
        self._last_read = now

    def _take(self, request: Request, tokens: list[int], flight: Flight, i: int, kept: int) -> None:
        seat, limits = self.seats[request.id], request.limits
        drafted = min(flight.k, max(self.scheduler.context - 1 - request.computed, 0)) if not flight.prefill else 0
        room = self.scheduler.cap(request) - request.length
        tokens = tokens[:room]
        end = next((n + 1 for n, token in enumerate(tokens) if token in seat.stops), None)
        if end is not None:
            tokens = tokens[:end]
        pushed = seat.words.push(tokens)
        if pushed.stopped:
            tokens = tokens[: pushed.tokens_used]
        if flight.prefill:
            self.scheduler.first(request, tokens[0])
        else:
            self.scheduler.advance(request, tokens)
            self.metrics.count(drafted, kept)
        self.metrics.generated_tokens += len(tokens)
        told = self._logprobs(flight.logprobs, i, tokens, limits.logprobs)
        step = Step(tuple(tokens), drafted, kept)
        reason: Reason | None = None
        if pushed.stopped or (end is not None and tokens[-1] in seat.stops):
            reason = "stop"
        elif request.length >= self.scheduler.cap(request):
            reason = "length"
        text = pushed.text if reason is None or pushed.stopped else pushed.text + seat.words.finish()
        seat.stream.put(Piece(step, text, told, None))
        if reason is not None:
            self._finish(request, reason)

    def _logprobs(
        self, logprobs: Logprobs | None, i: int, tokens: list[int], most: int | None
    ) -> tuple[TokenLogprob, ...]:
        """`most`: so many of the likeliest, though a neighbour may want more; None: nothing was asked for."""
        if most is None:
            return ()
        assert logprobs is not None
        told = []
        for r, token in enumerate(tokens):
            top = dict(zip(logprobs.ids[i, r, :most].tolist(), logprobs.values[i, r, :most].tolist(), strict=True))
            told.append(TokenLogprob(token, float(logprobs.chosen[i, r]), int(logprobs.rank[i, r]), top))
        return tuple(told)

    def _finish(self, request: Request, reason: Reason, error: str | None = None) -> None:
        self.scheduler.finish(request, reason, error)
        seat = self.seats.pop(request.id)
        self._leave(seat)
        self.metrics.finished[reason] += 1
        seat.stream.put(Piece(None, reason=reason, error=error))

    def _leave(self, seat: Seat) -> None:
        if seat.place is not None:
            self.stepper.places.leave(seat.place)
            seat.place = None

    def _fail_all(self, reason: str) -> None:
        for request in list(self.scheduler.live.values()):
            self._finish(request, "error", reason)

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
                f"exact mode cannot be had for {self.target.name!r} here: rows depend on their neighbours"
                " (as in mixtures of experts). Use --no-exact --dtype float32: a near tie is unlikely there"
            )
        self.stepper.multiple = multiple or 1
        return multiple is not None

    def _capture(self, count: int, k: int, k_next: int, longest: int = 0) -> None:
        known = self.stepper.captured(count, k, k_next, longest)
        if not known and not self.stepper.capture(count, k, k_next, longest):
            self.graphs = False

    def warm_up(self) -> None:
        """Before the first request: kernels are compiled, graphs captured."""
        ks = self.chooser.candidates if isinstance(self.chooser, AdaptiveK) else (self.k_most,)
        for batch in BUCKETS:
            if self.graphs and batch < 2 * self.scheduler.max_batch:
                for k, made in itertools.product(ks, (None, self.k_most)):
                    self._capture(batch, k, k if made is None else made)


def largest_k(k: int | str, pair: LoadedPair) -> int:
    if k == "auto":
        return max(K_LARGEST, pair.pair.k)
    if isinstance(k, int) and k >= 1:
        return k
    raise UserError(f"K is {k!r}: use a number of 1 or more, or auto")


def candidates(most: int) -> tuple[int, ...]:
    return (*(k for k in (0, 1, 2, 3, 5, 7, 9, 11, 15) if k < most), most)


def check_bias(sampling: Sampling, vocab: int) -> None:
    if bad := [token for token in sampling.logit_bias if token >= vocab]:
        raise UserError(f"logit_bias names token ids {bad[:5]}, but the target's vocabulary ends at {vocab - 1}")


def page_count(pair: LoadedPair, drafter: Any, tokens: int | None, page: int, batch: int, context: int, k: int) -> int:
    """As many as asked for; else what a GPU has room for, or a modest number on a CPU; never more than can be used."""
    most = batch * -(-(context + k + 1) // page)
    if tokens is not None:
        return max(1, min(most, -(-tokens // page)))
    target = pair.target
    if target.device.type != "cuda":
        return min(most, max(CPU_TOKENS, context) // page)
    each = sum(shape.bytes for shape in shapes_of(target, drafter)) * page
    free, _ = torch.cuda.mem_get_info(target.device)
    return max(1, min(most, int(free * MEMORY) // each))


def build(target: Any, drafter: Any, k: int, pages: int, page: int, batch: int, context: int) -> Stepper:
    try:
        return Stepper(target, drafter, k, pages, page, batch, context)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if "memory" not in str(error).lower():
            raise
        raise UserError(
            f"{pages * page:,} positions of keys and values do not fit the memory: lower --kv-tokens, --max-batch or"
            " --context"
        ) from error
