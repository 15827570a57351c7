"""BatchGenerator: continuous batching for throughput, where nobody waits for a single answer.

Each slot answers one request; when it is done, the next request takes the slot. Unlike the engine,
which reads back every step, the host looks only every 16 steps: with thousands of slots the
engine's host work per request and step takes longer than the step. Finished slots idle in between.
"""

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from peagle.engine.model.verifier import target_kv_shapes
from peagle.regenerate.decode_step import PAGE_SIZE, DecodeStep
from peagle.regenerate.repetition import MIN_TOKENS, WINDOW, find_loops, pad_rows
from peagle.target import Target

GREEDY_BELOW = 1e-5  # temperatures below it choose the argmax


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    steps_per_look: int  # decode steps between two looks of the host
    prefill_tokens: int  # prompt tokens of one prefill pass
    max_slots: int


GPU_LIMITS = DeviceLimits(steps_per_look=16, prefill_tokens=1 << 15, max_slots=2048)
CPU_LIMITS = DeviceLimits(steps_per_look=4, prefill_tokens=1 << 11, max_slots=16)
KV_MEMORY_FRACTION = 0.7  # Fraction of free GPU memory used for slots.
LOGIT_BYTES = 16  # per slot and vocabulary entry: logits, their float32 copy, and noise
REFILL_SHARE = 8  # A prefill waits until 1 / 8 of the slots are free.


@dataclass(frozen=True, slots=True)
class BatchRequest:
    key: Any
    ids: list[int]
    max_tokens: int
    temperature: float = 0.0

    @property
    def sampling_temperature(self) -> float:
        return self.temperature if self.temperature >= GREEDY_BELOW else 0.0


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    key: Any
    ids: list[int]  # including the stop token, if there is one
    reason: Literal["stop", "length", "loop"]


class BatchGenerator:
    """Owns the target while `run` is active: nothing else may use it between two answers."""

    def __init__(
        self, target: Target, slots: int, capacity: int, seed: int = 0, stop_loops: bool = True
    ) -> None:
        """`stop_loops`: end answers that repeat themselves."""
        assert slots >= 1 and capacity >= 2
        self.target = target
        self.slots = slots
        self.capacity = capacity
        self.stop_loops = stop_loops
        self.limits = device_limits(target)
        self.step = DecodeStep(target, slots, capacity, seed)
        self.live: dict[int, BatchRequest] = {}  # by slot
        self.lengths: dict[int, int] = {}  # tokens of each live answer, as of the last look
        self.tails: NDArray[np.int64] = np.zeros((0, WINDOW), dtype=np.int64)
        self.looping: set[int] = set()  # live slots whose answer repeats itself
        self.pending: list[BatchRequest] = []
        self.finished_tokens = 0
        self.is_warm = False

    def run(
        self, requests: Iterator[BatchRequest], on_step: Callable[[int], None] | None = None
    ) -> Iterator[BatchAnswer]:
        """Yield answers in the order they finish.

        `on_step` receives the number of generated tokens at every look of the host. The run ends
        when every slot is idle and `requests` has no more; an iterator may have more again later,
        such as a follow-up turn. The consumer handles an answer while the device computes.
        """
        finished: list[tuple[BatchRequest, list[int]]] = []
        try:
            if not self.is_warm:
                self.step.warm_up()
                self.is_warm = True
            self._fetch(requests)
            while self.pending or self.live or finished:
                self._refill()
                self._decode()
                yield from self._classify(finished)
                self._fetch(requests)
                finished = self._look()
                if on_step:
                    on_step(self.finished_tokens + sum(self.lengths.values()))
        finally:
            self._release(list(self.live))
            self.pending.clear()

    def _fetch(self, requests: Iterator[BatchRequest]) -> None:
        while len(self.pending) < self.slots and (request := next(requests, None)) is not None:
            assert request.ids and request.max_tokens >= 1
            length = len(request.ids) + request.max_tokens
            assert length <= self.capacity, "the request does not fit into a slot"
            self.pending.append(request)

    def _refill(self) -> None:
        """Give free slots to pending requests, if enough slots are free to be worth a pass."""
        free = [slot for slot in range(self.slots) if slot not in self.live]
        if not self.pending or (self.live and len(free) < max(1, self.slots // REFILL_SHARE)):
            return
        admitted = self.pending[: len(free)]
        self.pending = self.pending[len(free) :]
        admitted.sort(key=lambda request: len(request.ids))
        for group in self._prefill_groups(admitted):
            slots = [free.pop() for _ in group]
            self.step.prefill(slots, [request.ids for request in group])
            self.step.start(
                slots,
                [request.max_tokens for request in group],
                [request.sampling_temperature for request in group],
            )
            self.live.update(zip(slots, group, strict=True))
            self.lengths.update(dict.fromkeys(slots, 0))

    def _prefill_groups(self, requests: list[BatchRequest]) -> Iterator[list[BatchRequest]]:
        """As many requests per pass as the limit of prompt tokens allows."""
        group: list[BatchRequest] = []
        tokens = 0
        for request in requests:
            tokens += len(request.ids)
            if group and tokens > self.limits.prefill_tokens:
                yield group
                group = []
                tokens = len(request.ids)
            group.append(request)
        yield group

    def _decode(self) -> None:
        if self.live:
            greedy = not any(request.sampling_temperature for request in self.live.values())
            self.step.run(self.limits.steps_per_look, greedy)

    def _look(self) -> list[tuple[BatchRequest, list[int]]]:
        """Take finished answers out of their slots. Only here the host waits for the device."""
        if not self.live:
            return []
        snapshot = self.step.snapshot(WINDOW)
        self.tails = snapshot.tails
        self.lengths = {slot: int(snapshot.counts[slot]) for slot in self.live}
        ended = [slot for slot in self.live if snapshot.done[slot] or slot in self.looping]
        longest = max((self.lengths[slot] for slot in ended), default=0)
        answers = self.step.read_answers(ended, longest)
        finished = [
            (self.live[slot], ids[: self.lengths[slot]])
            for slot, ids in zip(ended, answers, strict=True)
        ]
        self.finished_tokens += sum(self.lengths[slot] for slot in ended)
        self._release(ended)
        return finished

    def _release(self, slots: list[int]) -> None:
        if slots:
            self.step.free(slots)
        for slot in slots:
            del self.live[slot], self.lengths[slot]
            self.looping.discard(slot)

    def _classify(self, finished: list[tuple[BatchRequest, list[int]]]) -> Iterator[BatchAnswer]:
        """Yield finished answers and note slots that loop, while the device computes."""
        loops = find_loops(pad_rows([ids for _, ids in finished]))
        for (request, ids), is_loop in zip(finished, loops, strict=True):
            stopped = ids[-1] in self.target.stop_ids
            yield BatchAnswer(
                request.key, ids, "loop" if is_loop else "stop" if stopped else "length"
            )
        if not self.stop_loops:
            return
        candidates = [slot for slot, length in self.lengths.items() if length >= MIN_TOKENS]
        if candidates:
            self.looping.update(np.array(candidates)[find_loops(self.tails[candidates])])


def device_limits(target: Target) -> DeviceLimits:
    return GPU_LIMITS if target.device.type == "cuda" else CPU_LIMITS


def auto_slots(target: Target, capacity: int, requests: int) -> int:
    """As many slots as fit beside the target, up to where a step gets no more efficient."""
    slots = max(1, min(requests, device_limits(target).max_slots))
    if target.device.type != "cuda":
        return slots
    positions = -(-capacity // PAGE_SIZE) * PAGE_SIZE
    kv_bytes = positions * sum(shape.bytes for shape in target_kv_shapes(target))
    free_bytes, _ = torch.cuda.mem_get_info(target.device)
    slot_bytes = kv_bytes + target.vocab_size * LOGIT_BYTES
    return max(1, min(slots, int(free_bytes * KV_MEMORY_FRACTION) // slot_bytes))


def free_memory() -> None:
    """Return the memory of a deleted generator to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
