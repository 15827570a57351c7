"""Many answers at once: continuous batching for work that nobody waits for.

Each slot answers one request; when it is done, the next request takes its place. The host looks only every few steps:
meanwhile finished slots idle, and the device never waits for the host.
"""

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from peagle.regenerate.decode_step import DecodeStep
from peagle.regenerate.loops import TOKENS, WINDOW, filled, looping
from peagle.regenerate.slots import slot_attention
from peagle.target import Target

STEPS = {"cuda": 16}  # between two looks of the host; elsewhere a step is dear and a look is cheap
STEPS_ELSEWHERE = 4
PREFILL_TOKENS = {"cuda": 1 << 15}  # in one pass, padding included
PREFILL_ELSEWHERE = 1 << 11
PAD = 32  # prompts are padded to a multiple, so that shapes repeat
MOST_SLOTS, SLOTS_ELSEWHERE = 2048, 16
MEMORY = 0.7  # the share of what is free that slots may take
LOGIT_BYTES = 16  # per slot and entry of the vocabulary: logits as they come, in float32, and noise
SHARE = 8  # a prefill waits until one slot in so many is free


@dataclass(frozen=True, slots=True)
class BatchRequest:
    key: Any
    ids: list[int]
    max_tokens: int
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    key: Any
    ids: list[int]  # with the stop token, where it came to one
    reason: Literal["stop", "length", "loop"]


class BatchGenerator:
    """Owns the target while `run` is under way: nothing else may use it between two answers."""

    def __init__(
        self, target: Target, slots: int, capacity: int, seed: int = 0, stop_loops: bool = True
    ) -> None:
        """`stop_loops`: an answer that goes round in circles is ended."""
        assert slots >= 1 and capacity >= 2
        device = target.device.type
        self.target, self.slots, self.capacity, self.stop_loops = (
            target,
            slots,
            capacity,
            stop_loops,
        )
        self.steps = STEPS.get(device, STEPS_ELSEWHERE)
        self.prefill_tokens = PREFILL_TOKENS.get(device, PREFILL_ELSEWHERE)
        self.step = DecodeStep(target, slots, capacity, seed)
        self.live: dict[int, BatchRequest] = {}  # by slot
        self.said: dict[int, int] = {}  # tokens of each live slot's answer, when last looked
        self.tails: NDArray[np.int64] = np.zeros(
            (0, WINDOW), dtype=np.int64
        )  # the last tokens of each slot
        self.looped: set[int] = set()  # live slots that go round in circles
        self.pending: list[BatchRequest] = []
        self.made = 0  # tokens of finished answers
        self.warm = False

    def run(
        self, requests: Iterator[BatchRequest], on_step: Callable[[int], None] | None = None
    ) -> Iterator[BatchAnswer]:
        """Answers in the order they finish; `on_step` hears the tokens made so far at every look of the host.

        It ends when every slot is idle and `requests` has no more. An iterator may have more again after it had none:
        a follow-up turn, say. The consumer's work on an answer runs beside the device's on the next tokens.
        """
        finished: list[tuple[BatchRequest, list[int]]] = []
        self.target.tap(())
        with slot_attention(self.target):
            try:
                self._warm_up()
                self._fetch(requests)
                while self.pending or self.live or finished:
                    self._refill()
                    self._decode()
                    yield from self._judge(finished)
                    self._fetch(requests)
                    finished = self._look()
                    if on_step:
                        on_step(self.made + sum(self.said.values()))
            finally:
                self._release(list(self.live))
                self.pending.clear()

    def _warm_up(self) -> None:
        if not self.warm:
            self.step.warm_up()
            self.warm = True

    def _fetch(self, requests: Iterator[BatchRequest]) -> None:
        while len(self.pending) < self.slots and (request := next(requests, None)) is not None:
            assert request.ids and request.max_tokens >= 1
            assert len(request.ids) + request.max_tokens <= self.capacity, (
                "the slots are too short for this request"
            )
            self.pending.append(request)

    def _refill(self) -> None:
        """Free slots take what is pending, if there are enough of them to be worth a pass."""
        free = [slot for slot in range(self.slots) if slot not in self.live]
        if not self.pending or (self.live and len(free) < max(1, self.slots // SHARE)):
            return
        taken, self.pending = self.pending[: len(free)], self.pending[len(free) :]
        taken.sort(key=lambda request: len(request.ids))
        for group in self._groups(taken):
            slots = [free.pop() for _ in group]
            self.step.prefill(slots, [request.ids for request in group], self._width(group[-1]))
            self.step.start(slots, [r.max_tokens for r in group], [heat(r) for r in group])
            self.live.update(zip(slots, group, strict=True))
            self.said.update(dict.fromkeys(slots, 0))

    def _groups(self, requests: list[BatchRequest]) -> Iterator[list[BatchRequest]]:
        """Short before long, as many in one pass as its tokens allow."""
        group: list[BatchRequest] = []
        for request in requests:
            if group and (len(group) + 1) * self._width(request) > self.prefill_tokens:
                yield group
                group = []
            group.append(request)
        yield group

    def _width(self, request: BatchRequest) -> int:
        return min(self.capacity, max(1, -(-(len(request.ids) - 1) // PAD)) * PAD)

    def _decode(self) -> None:
        if not self.live:
            return
        if (
            self.target.device.type != "cuda"
        ):  # no graph: a step may look at fewer keys than the capacity
            longest = max(len(request.ids) + self.said[slot] for slot, request in self.live.items())
            self.step.cache.end = min(self.capacity, longest + self.steps)
        self.step.run(self.steps, greedy=not any(map(heat, self.live.values())))

    def _look(self) -> list[tuple[BatchRequest, list[int]]]:
        """The one place where the host waits for the device: what is finished is taken out of its slot."""
        if not self.live:
            return []
        done, counts, self.tails = self.step.look(WINDOW)
        self.said = {slot: int(counts[slot]) for slot in self.live}
        ended = [slot for slot in self.live if done[slot] or slot in self.looped]
        rows = self.step.said(ended, max((self.said[slot] for slot in ended), default=0))
        finished = [
            (self.live[slot], row[: self.said[slot]]) for slot, row in zip(ended, rows, strict=True)
        ]
        self.made += sum(self.said[slot] for slot in ended)
        self._release(ended)
        return finished

    def _release(self, slots: list[int]) -> None:
        if slots:
            self.step.free(slots)
        for slot in slots:
            del self.live[slot], self.said[slot]
            self.looped.discard(slot)

    def _judge(self, finished: list[tuple[BatchRequest, list[int]]]) -> Iterator[BatchAnswer]:
        """Runs beside the device: the answers, and which slots should go no further."""
        for (request, ids), loops in zip(
            finished, looping(filled([ids for _, ids in finished])), strict=True
        ):
            stopped = ids[-1] in self.target.stop_ids
            yield BatchAnswer(
                request.key, ids, "loop" if loops else "stop" if stopped else "length"
            )
        if not self.stop_loops:
            return
        old = [
            slot for slot, said in self.said.items() if said >= TOKENS
        ]  # as of the last look, like the tails
        self.looped.update(np.array(old)[looping(self.tails[old])] if old else ())


def heat(request: BatchRequest) -> float:
    """The temperature; 0 where it is so low that the likeliest token takes all."""
    return request.temperature if request.temperature >= 1e-5 else 0.0


def auto_slots(target: Target, capacity: int, requests: int) -> int:
    """As many as the device's memory holds beside the target, up to what still makes a step more efficient."""
    wanted = max(1, min(requests, MOST_SLOTS if target.device.type == "cuda" else SLOTS_ELSEWHERE))
    if target.device.type != "cuda":
        return wanted
    config = target.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cached = 2 * len(target.layers) * heads * size * capacity * target.dtype.itemsize
    free, _ = torch.cuda.mem_get_info(target.device)
    return max(1, min(wanted, int(free * MEMORY) // (cached + target.vocab_size * LOGIT_BYTES)))


def free_memory() -> None:
    """What a generator held goes back to the device: its cache and target refer to each other."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
