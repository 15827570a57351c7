"""Rounds: plan a step, launch it, read back the one before, hand out what it says.

On a GPU the device always has work while the host thinks; on a CPU there is nothing to overlap, and each step is read
back at once. So is a round with a request that is bound to a grammar: its next masks depend on what it said.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor

from peagle.core import Step
from peagle.draft_shape import NO_DRAFT, DraftShape
from peagle.engine.detokenizer import Detokenizer
from peagle.engine.metrics import Metrics
from peagle.engine.policy.accepted import accepted_counts
from peagle.engine.policy.adaptive import AdaptivePolicy
from peagle.engine.policy.draft_policy import DraftPolicy
from peagle.engine.sampling.grammar_masks import GrammarMasks, GrammarState
from peagle.engine.sampling.sampler import Logprobs, Sampler
from peagle.engine.sampling.sampling_state import SamplingState
from peagle.engine.schedule.request import FinishReason, PrefillChunk, Request
from peagle.engine.schedule.scheduler import Scheduler, StepPlan
from peagle.engine.step.step_output import StepOutput, StepRecord
from peagle.engine.step.stepper import BATCH_BUCKETS, Stepper
from peagle.engine.stream import Stream, StreamPiece, TokenLogprob


@dataclass(slots=True)
class RequestState:
    """What the engine knows of a request beside the scheduler: where it sits, and whom to tell."""

    stream: Stream
    words: Detokenizer
    stops: frozenset[int]
    binding: GrammarState | None = None  # to its grammar
    place: int | None = None
    history: SamplingState | None = None
    drafted: DraftShape = (
        NO_DRAFT  # what waits to be verified: of a tree, the chain of its depth too
    )
    draft_confidence: list[float] | None = None  # how the drafter judges its drafts that wait
    table: int = 0  # pages the device knows

    def cut(self, tokens: list[int]) -> tuple[list[int], bool]:
        """Up to a stop token or the end of the grammar; is there one?"""
        end = None
        if not self.stops.isdisjoint(tokens):
            end = next(n + 1 for n, token in enumerate(tokens) if token in self.stops)
            tokens = tokens[:end]
        if self.binding is None:
            return tokens, end is not None
        return tokens[: self.binding.consume(tokens)], self.binding.terminated or end is not None


@dataclass(frozen=True, slots=True)
class BatchEntry:
    """A request in a pass that is about to be launched: still right if the request is aborted meanwhile."""

    request: Request
    seat: RequestState
    place: int


@dataclass(slots=True)
class InFlightPass:
    """A launched pass whose result is on its way to the host."""

    requests: list[Request]
    packed: Tensor
    logprobs: Logprobs | None
    tree: DraftShape
    prefill: bool
    event: Any = None
    started: float = 0.0
    # its time is that of a decode step that verified and made one form, and nothing else
    timed: bool = False
    verify_seconds: float | None = None
    draft_seconds: float | None = None


class EngineLoop:
    def __init__(
        self,
        stepper: Stepper,
        scheduler: Scheduler,
        chooser: DraftPolicy,
        largest: DraftShape,
        exact: bool,
        graphs: bool,
    ) -> None:
        """`largest`: what there is to choose from is part of it."""
        self.stepper, self.scheduler, self.chooser = stepper, scheduler, chooser
        self.largest, self.exact, self.graphs = largest, exact, graphs
        self.lock = threading.Condition()  # over everything here but the device's work
        self.metrics = Metrics(k=largest.k)
        self.states: dict[str, RequestState] = {}
        self.in_flight: deque[InFlightPass] = deque()
        self.lookahead = 1 if stepper.places.device.type == "cuda" else 0
        self._processing: tuple[tuple[str, ...], Sampler | None] = ((), None)
        self._last_read = 0.0
        self.step_hook: Callable[[StepRecord], None] | None = None

    def run(self) -> bool:
        """One round. False: there was nothing to do."""
        with self.lock:
            plan = self._plan()
            news: list[tuple[int, int, list[int]]] = []
            chunks = [(chunk, self._member(chunk.request, news)) for chunk in plan.prefill]
            members = [self._member(request, news) for request in plan.decode]
            self.stepper.places.write(news, self.scheduler.pages.count)
        for group in [[pair] for pair in chunks] if self.exact else [chunks] if chunks else []:
            self._prefill(group)
        for part in (
            [[member] for member in members] if self.exact else [members] if members else []
        ):
            self._decode(part, alone=not chunks)
        worked = bool(chunks or members)
        bound = any(member.seat.binding for member in (*members, *(member for _, member in chunks)))
        while self.in_flight and (len(self.in_flight) > self.lookahead or bound or not worked):
            self._read(self.in_flight.popleft())
            worked = True
        return worked

    def warm_up(self) -> None:
        """Before the first request: kernels are compiled, graphs captured."""
        adaptive = self.chooser if isinstance(self.chooser, AdaptivePolicy) else None
        chain = DraftShape(self.largest.k, self.largest.k)  # where somebody is bound to a grammar
        forms = {self.largest, chain} if adaptive is None else adaptive.candidates
        for batch in BATCH_BUCKETS:
            if self.graphs and batch < 2 * self.scheduler.max_batch:
                for form in forms:
                    self._capture(batch, form, form)
                    self._capture(batch, form, self.largest)
        if self.graphs and adaptive is not None:
            adaptive.calibrate(self.stepper.costs(forms))
        if self.graphs:
            self.stepper.prefilling.capture(self.scheduler.max_batch, self.largest)

    def _plan(self) -> StepPlan:
        rows = max(
            self.largest.nodes + 1, 2 * self.largest.k
        )  # the drafter may look further than the target
        plan = self.scheduler.plan(rows)
        for request in plan.preempted:
            self._leave(self.states[request.id])
        return plan

    def _member(self, request: Request, news: list[tuple[int, int, list[int]]]) -> BatchEntry:
        """The request at its place; `news`: what the device must be told of it."""
        seat, places = self.states[request.id], self.stepper.places
        if seat.place is None:
            seat.place, seat.table, seat.drafted = places.take(), 0, NO_DRAFT
            seat.history = SamplingState(
                request.sampling,
                request.prompt,
                request.limits.max_tokens + self.largest.k + 1,
                vocab=self.stepper.target.vocab_size,
                device=self.stepper.target.device,
                min_tokens=0 if seat.binding else request.limits.min_tokens,
                stop_ids=seat.stops,
                output=request.output,
            )
            self.metrics.cached_tokens += request.cached
            self._processing = ((), None)  # a request that comes back has a new history
        if seat.table < len(request.pages):
            shared = request.cached // self.scheduler.pages.size
            self.stepper.memory.renew(request.pages[max(seat.table, shared) :])
            end = min(
                self.scheduler.context,
                len(request.prompt) + request.limits.max_tokens + self.largest.k,
            )
            news.append((seat.place, end, request.pages))
            seat.table = len(request.pages)
        return BatchEntry(request, seat, seat.place)

    def _prefill(self, chunks: list[tuple[PrefillChunk, BatchEntry]]) -> None:
        started = time.perf_counter()
        fresh = [member for chunk, member in chunks if chunk.next_id is None]
        made = self.largest  # what is not wanted is left unused
        result = self.stepper.prefilling.run(
            [chunk for chunk, _ in chunks],
            [member.place for _, member in chunks],
            made,
            self._process(fresh),
            self._top(fresh),
            self.graphs,
            self._masks(fresh),
        )
        with self.lock:
            for chunk, member in chunks:
                member.seat.drafted, member.seat.draft_confidence = made, None
                if not chunk.request.finished:
                    self.scheduler.prefilled(chunk)
        if result is not None:
            self._launch(result, [member.request for member in fresh], NO_DRAFT, prefill=True)
        self.metrics.prefill_passes += 1
        self.metrics.prefill_seconds += time.perf_counter() - started

    def _decode(self, members: list[BatchEntry], alone: bool) -> None:
        """`alone`: no prefill runs in the same round."""
        masks = self._masks(members)
        choice = self.chooser.choose(
            len(members),
            self._draft_confidence(members),
            chains_only=masks is not None,
            timed=alone,
        )
        wanted = choice.shape
        self.metrics.k, self.metrics.nodes, self.metrics.k_reason = (
            wanted.k,
            wanted.nodes,
            choice.reason,
        )
        tree = verifiable_shape(wanted, [member.seat.drafted for member in members])
        made = wanted if tree == wanted else self.largest  # so there is a graph for every change
        started = time.perf_counter()
        if self.graphs:
            self._capture(len(members), tree, made)
        result = self.stepper.decode(
            [member.place for member in members],
            tree,
            made,
            self._process(members),
            self._top(members),
            masks,
        )
        draft_confidence = (
            [None] * len(members)
            if result.draft_confidence is None
            else result.draft_confidence.tolist()
        )
        with self.lock:
            for member, judged in zip(members, draft_confidence, strict=True):
                member.request.ahead += tree.k + 1
                member.seat.drafted, member.seat.draft_confidence = made, judged
        requests = [member.request for member in members]
        self._launch(result, requests, tree, started=started, timed=alone and tree == made)
        self.metrics.steps += 1
        self.metrics.k_steps[tree.nodes] += 1

    def _draft_confidence(self, members: list[BatchEntry]) -> list[float] | None:
        """Of each position the mean, as far as all of them reach; None if somebody has none."""
        judged = [
            member.seat.draft_confidence
            for member in members
            if member.seat.draft_confidence is not None
        ]
        if len(judged) < len(members):
            return None
        return [sum(column) / len(column) for column in zip(*judged, strict=False)]

    def _process(self, members: list[BatchEntry]) -> Sampler | None:
        """None: every request takes the likeliest token and nothing else. Built anew only when the batch changes."""
        histories = [member.seat.history for member in members if member.seat.history is not None]
        if all(history.plain for history in histories):
            return None
        names = tuple(member.request.id for member in members)
        if self._processing[0] != names:
            self._processing = (names, Sampler(histories, self.largest.nodes + 1))
        return self._processing[1]

    def _masks(self, members: list[BatchEntry]) -> GrammarMasks | None:
        bound = [
            (row, member.seat.binding)
            for row, member in enumerate(members)
            if member.seat.binding is not None
        ]
        return GrammarMasks(bound) if bound else None

    def _top(self, members: list[BatchEntry]) -> int | None:
        """The most log-probabilities that one of them wants; at least the token's own."""
        wanted = [n for member in members if (n := member.request.limits.logprobs) is not None]
        return max(*wanted, 1) if wanted else None

    def _launch(
        self,
        result: StepOutput,
        requests: list[Request],
        tree: DraftShape,
        prefill: bool = False,
        started: float = 0.0,
        timed: bool = False,
    ) -> None:
        packed, event, logprobs = result.packed, None, result.logprobs
        if packed.is_cuda:
            packed = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True).copy_(
                packed, non_blocking=True
            )
            if logprobs is not None:
                logprobs = Logprobs(*(x.to("cpu", non_blocking=True) for x in logprobs))
            event = torch.cuda.Event()
            event.record()
        self.in_flight.append(
            InFlightPass(
                requests,
                packed,
                logprobs,
                tree,
                prefill,
                event,
                started,
                timed,
                result.verify_seconds,
                result.draft_seconds,
            )
        )

    def _read(self, flight: InFlightPass) -> None:
        """Waits for a pass and hands out what it says."""
        if flight.event is not None:
            flight.event.synchronize()
        now, held, k = time.perf_counter(), [], flight.tree.k
        with self.lock:
            for i, (request, row) in enumerate(
                zip(flight.requests, flight.packed.tolist(), strict=True)
            ):
                tokens, (kept, broken, *more) = row[: k + 1], row[k + 1 :]
                if not flight.prefill:
                    request.ahead -= k + 1
                if request.finished:
                    continue
                if broken:
                    self.finish(
                        request,
                        "error",
                        "the target's logits are not numbers: its weights or this prompt"
                        " overflow the dtype. Use float32",
                    )
                    continue
                self._take(request, tokens[: kept + 1], flight, i, kept)
                held.append(accepted_counts(kept, more))
        if not flight.prefill:
            seconds = now - max(flight.started, self._last_read)
            self.metrics.step_seconds += seconds
            if self.step_hook is not None:
                self.step_hook(
                    StepRecord(
                        len(flight.requests),
                        flight.tree,
                        seconds,
                        flight.verify_seconds,
                        flight.draft_seconds,
                    )
                )
            if held:
                self.chooser.observe(
                    len(flight.requests), flight.tree, seconds if flight.timed else None, held
                )
        self._last_read = now

    def _take(
        self, request: Request, tokens: list[int], flight: InFlightPass, i: int, kept: int
    ) -> None:
        seat, limits = self.states[request.id], request.limits
        drafted = (
            min(flight.tree.k, max(self.scheduler.context - 1 - request.computed, 0))
            if not flight.prefill
            else 0
        )
        cap = self.scheduler.cap(request)
        tokens, ended = seat.cut(tokens[: cap - request.length])
        if seat.binding is not None and seat.binding.error:
            self.finish(
                request,
                "refused",
                f"the answer cannot be kept to its grammar: {seat.binding.error}",
            )
            return
        pushed = seat.words.push(tokens)
        if pushed.stopped:
            tokens = tokens[: pushed.tokens_used]
        if flight.prefill:
            self.scheduler.first(request, tokens[0])
        else:
            self.scheduler.advance(request, tokens)
            self.metrics.fared[drafted, kept] += 1
        self.metrics.generated_tokens += len(tokens)
        told = self._logprobs(flight.logprobs, i, tokens, limits.logprobs)
        step = Step(tuple(tokens), drafted, kept)
        reason: FinishReason | None = None
        if pushed.stopped or ended:
            reason = "stop"
        elif request.length >= cap:
            reason = "length"
        text = (
            pushed.text if reason is None or pushed.stopped else pushed.text + seat.words.finish()
        )
        seat.stream.put(StreamPiece(step, text, told, None))
        if reason is not None:
            self.finish(request, reason)

    def _logprobs(
        self, logprobs: Logprobs | None, i: int, tokens: list[int], most: int | None
    ) -> tuple[TokenLogprob, ...]:
        """`most`: so many of the likeliest, though a neighbor may want more; None: nothing was asked for."""
        if most is None:
            return ()
        assert logprobs is not None
        told = []
        for r, token in enumerate(tokens):
            top = zip(
                logprobs.ids[i, r, :most].tolist(),
                logprobs.values[i, r, :most].tolist(),
                strict=True,
            )
            likely = {
                other: value for other, value in top if value > -inf
            }  # a grammar may allow fewer
            told.append(
                TokenLogprob(token, float(logprobs.chosen[i, r]), int(logprobs.rank[i, r]), likely)
            )
        return tuple(told)

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        if (
            reason == "error"
        ):  # its pages may hold what is no number, and so may the one that is nobody's
            own = [page for page in request.pages if self.scheduler.pages.refs[page] == 1]
            self.stepper.memory.clear([*own, self.scheduler.pages.count])
        self.scheduler.finish(request, reason, error)
        seat = self.states.pop(request.id)
        self._leave(seat)
        self.metrics.finished[reason] += 1
        seat.stream.put(StreamPiece(None, reason=reason, error=error))

    def _leave(self, seat: RequestState) -> None:
        if seat.place is not None:
            self.stepper.places.leave(seat.place)
            seat.place = None

    def fail_all(self, reason: str) -> None:
        for request in list(self.scheduler.live.values()):
            self.finish(request, "error", reason)

    def _capture(self, count: int, tree: DraftShape, made: DraftShape) -> None:
        known = self.stepper.captured(count, tree, made)
        if not known and not self.stepper.capture(count, tree, made):
            self.graphs = False


def verifiable_shape(wanted: DraftShape, drafted: list[DraftShape]) -> DraftShape:
    """What all requests have of what is wanted: as much of the tree, or else a chain. Drafts may be left unused: a
    smaller tree is the beginning of a larger one, a shorter chain of a longer one."""
    if not wanted.is_chain and not any(one.is_chain for one in drafted):
        return DraftShape(wanted.k, min(wanted.nodes, *(one.nodes for one in drafted)))
    k = min(wanted.k, *(one.k for one in drafted))
    return DraftShape(k, k)
