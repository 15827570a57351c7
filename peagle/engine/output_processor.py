"""OutputProcessor: delivers the results of passes to the streams of their requests.

read-back tokens -> cut at stop tokens, grammar and length -> detokenize -> stream
"""

from math import inf

from peagle.core import Step
from peagle.engine.in_flight import InFlightPass
from peagle.engine.metrics import Metrics
from peagle.engine.policy.accepted import AcceptedCounts
from peagle.engine.request_state import RequestState
from peagle.engine.sampling.sampler import Logprobs
from peagle.engine.schedule.request import FinishReason, Request
from peagle.engine.schedule.scheduler import Scheduler
from peagle.engine.step.step_output import AcceptedBatch
from peagle.engine.step.stepper import Stepper
from peagle.engine.stream import StreamPiece, TokenLogprob

NOT_FINITE = (
    "the target's logits are not finite: its weights or this prompt overflow the dtype. Set `dtype`"
    " to float32"
)


class OutputProcessor:
    """Callers hold the loop's lock."""

    def __init__(self, stepper: Stepper, scheduler: Scheduler, metrics: Metrics) -> None:
        self.stepper = stepper
        self.scheduler = scheduler
        self.metrics = metrics
        self.states: dict[str, RequestState] = {}  # Of live requests, by id.

    def deliver(self, launched: InFlightPass) -> list[AcceptedCounts | None]:
        """Deliver a pass that has arrived on the host.

        Returns what was accepted for each request; None if it is not live any more.
        """
        live_counts: list[AcceptedCounts | None] = [None] * len(launched.requests)
        ahead = 0 if launched.is_prefill else launched.shape.k + 1
        batch = launched.output.unpack()
        assert len(batch.tokens) == len(launched.requests)
        for index, request in enumerate(launched.requests):
            request.ahead -= ahead
            if request.finished:
                if batch.broken[index]:  # Its own pages count as unverified since its abort.
                    self._zero_pages([])
                continue
            if batch.broken[index]:
                self._zero_pages(self.scheduler.allocator.unshared(request.pages))
                self.finish(request, "error", NOT_FINITE)
                continue
            self._deliver_tokens(request, launched, batch, index)
            live_counts[index] = batch.counts[index]
        return live_counts

    def _deliver_tokens(
        self, request: Request, launched: InFlightPass, batch: AcceptedBatch, index: int
    ) -> None:
        """Deliver the row `index` of a pass to its request."""
        state = self.states[request.id]
        scheduler = self.scheduler
        accepted = batch.accepted[index]
        drafted = 0
        if not launched.is_prefill:
            drafted = min(launched.shape.k, max(scheduler.context - 1 - request.computed, 0))
            if launched.ngram is not None:
                drafted = min(drafted, launched.ngram.draft_counts[index])
        max_length = scheduler.max_length(request)
        tokens, ended = state.cut(batch.tokens[index][: max_length - request.length])
        if state.constraint is not None and state.constraint.error:
            reason = f"the answer cannot follow its grammar: {state.constraint.error}"
            self.finish(request, "refused", reason)
            return
        pushed = state.detokenizer.push(state.shown(tokens))
        if pushed.stopped:
            tokens = tokens[: pushed.tokens_used]
        if launched.is_prefill:
            scheduler.append_first(request, tokens[0])
        else:
            scheduler.append(request, tokens)
            self.metrics.pass_counts[drafted, accepted] += 1
        self.metrics.generated_tokens += len(tokens)
        finish_reason: FinishReason | None = None
        if pushed.stopped or ended:
            finish_reason = "stop"
        elif request.length >= max_length:
            finish_reason = "length"
        text = pushed.text
        if finish_reason is not None and not pushed.stopped:
            text += state.detokenizer.finish()
        logprobs = token_logprobs(launched.output.logprobs, index, tokens, request.limits.logprobs)
        step = Step(tuple(tokens), drafted, accepted)
        state.stream.put(StreamPiece(step, text, logprobs))
        if finish_reason is not None and not request.finished:  # A listener may have aborted it.
            self.finish(request, finish_reason)

    def finish(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """End a live request, and send the last piece to its stream. The device is not touched."""
        self.scheduler.finish(request, reason, error)
        state = self.states.pop(request.id)
        self.release_slot(state)
        self.metrics.finished[reason] += 1
        stop_string = state.detokenizer.stop_string
        state.stream.put(StreamPiece(None, reason=reason, error=error, stop_string=stop_string))

    def _zero_pages(self, own_pages: list[int]) -> None:
        """Overwrite pages that may hold NaN, and the page of rows that are not stored likewise."""
        kv_cache = self.stepper.kv_cache
        kv_cache.zero_pages([*own_pages, kv_cache.discard_page])

    def release_slot(self, state: RequestState) -> None:
        if state.slot is not None:
            self.stepper.slots.release(state.slot)
            state.slot = None


def token_logprobs(
    logprobs: Logprobs | None, row: int, tokens: list[int], top: int | None
) -> tuple[TokenLogprob, ...]:
    """The log-probabilities of a request's tokens, with the `top` most likely ones of each.

    `logprobs` may hold more of them, which another request asked for. None: not asked for.
    """
    if top is None:
        return ()
    assert logprobs is not None
    token_values = []
    for i, token in enumerate(tokens):
        greedy_tokens = zip(
            logprobs.ids[row, i, :top].tolist(), logprobs.values[row, i, :top].tolist(), strict=True
        )
        # A grammar may allow fewer tokens.
        allowed = {other: value for other, value in greedy_tokens if value > -inf}
        chosen = float(logprobs.chosen[row, i])
        token_values.append(TokenLogprob(token, chosen, int(logprobs.rank[row, i]), allowed))
    return tuple(token_values)
