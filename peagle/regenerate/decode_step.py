"""DecodeStep: one token for every slot, without the host in between.

A slot answers one request. It owns a fixed run of KV pages, so that the page tables never change
and a step is one CUDA graph. Model, KV cache, attention and graphs are the engine's.

State of a slot, all on the device:

    tokens        [slots]: the token that the next step feeds, at position `lengths`
    lengths       [slots]: positions of the slot that are in the KV cache
    counts        [slots]: tokens of the answer so far; `answers[slot, :counts]` holds them
    done          [slots]: a finished or free slot still computes, because a step has one shape, but
                  its state does not change
"""

from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peagle.engine.kv.kv_cache import KVCache
from peagle.engine.model.paged_limits import check_paged_context
from peagle.engine.model.verifier import build_verifier, target_kv_shapes
from peagle.engine.step.graphs import Graphs
from peagle.kernels.row_pass import RowPass
from peagle.target import Target

PAGE_SIZE = 64
SMALLEST_NOISE = 1e-20  # keeps the logarithm of the noise finite


class SlotSnapshot(NamedTuple):
    """What the host sees of all slots."""

    done: NDArray[np.bool_]  # [slots]
    counts: NDArray[np.int64]  # [slots]
    tails: NDArray[
        np.int64
    ]  # [slots, tail] the last tokens of each answer; negative before its first


class DecodeStep:
    def __init__(self, target: Target, slots: int, capacity: int, seed: int = 0) -> None:
        """`capacity`: positions of a slot, prompt and answer together."""
        device = target.device
        self.target = target
        self.capacity = capacity
        check_paged_context(target, capacity)
        self.model = build_verifier(target, capacity)
        pages_per_slot = -(-capacity // PAGE_SIZE)
        pages = slots * pages_per_slot
        self.kv_cache = KVCache(target_kv_shapes(target), pages, PAGE_SIZE, device)
        page_ids = torch.arange(pages, dtype=torch.int32, device=device)
        self.page_tables = page_ids.view(slots, pages_per_slot)
        self.first_kv_slots = self.page_tables[:, 0].long() * PAGE_SIZE
        self.slot_index = torch.arange(slots, device=device)
        self.slot_rows = self.slot_index.int()
        self.one_row = torch.ones(slots, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(slots, dtype=torch.long, device=device)
        self.lengths = torch.zeros(slots, dtype=torch.long, device=device)
        self.counts = torch.zeros(slots, dtype=torch.long, device=device)
        self.limits = torch.zeros(slots, dtype=torch.long, device=device)
        self.temperatures = torch.zeros(slots, device=device)
        self.done = torch.ones(slots, dtype=torch.bool, device=device)
        self.answers = torch.zeros(slots, capacity, dtype=torch.long, device=device)
        self.stop_ids = torch.tensor(sorted(target.stop_ids), dtype=torch.long, device=device)
        self.graphs = Graphs()  # by whether every slot is greedy
        self.generator: torch.Generator | None = None
        if device.type == "cuda":
            torch.cuda.manual_seed(seed)  # CUDA graphs replay with the default generator.
        else:
            self.generator = torch.Generator(device).manual_seed(seed)

    @torch.inference_mode()
    def prefill(self, slots: list[int], prompts: list[list[int]]) -> None:
        """Store all but the last token of each prompt; the slot's first step feeds that one.

        So a prefill needs no logits, and the first token of an answer is chosen like every other.
        """
        stored = [len(ids) - 1 for ids in prompts]
        index = self._upload(slots)
        if any(stored):
            ids = self._upload([token for prompt in prompts for token in prompt[:-1]])
            self.model.forward(
                ids,
                self._prefill_rows(slots, stored, index),
                self.kv_cache,
                logit_rows=index[:1] * 0,
            )
        self.lengths[index] = self._upload(stored)
        self.tokens[index] = self._upload([prompt[-1] for prompt in prompts])

    def start(self, slots: list[int], limits: list[int], temperatures: list[float]) -> None:
        """Let these slots answer, from the next step on."""
        index = self._upload(slots)
        self.limits[index] = self._upload(limits)
        self.temperatures[index] = torch.tensor(
            temperatures, dtype=torch.float32, device=index.device
        )
        self.counts[index] = 0
        self.done[index] = False

    def free(self, slots: list[int]) -> None:
        """Stop these slots; from now on they read one key per step."""
        index = self._upload(slots)
        self.done[index] = True
        self.lengths[index] = 0

    def run(self, steps: int, greedy: bool) -> None:
        """Decode `steps` tokens for every live slot. CUDA computes them asynchronously."""
        for _ in range(steps):
            self.graphs.run(greedy, lambda: self.step(greedy))

    @torch.inference_mode()
    def step(self, greedy: bool) -> None:
        logits, _ = self.model.forward(self.tokens, self._decode_rows(), self.kv_cache)
        chosen = self.choose(logits, greedy)
        live = ~self.done
        end = (self.slot_index, self.counts)
        self.answers[end] = torch.where(live, chosen, self.answers[end])
        self.tokens.copy_(torch.where(live, chosen, self.tokens))
        self.counts += live
        self.lengths += live
        stopped = (chosen[:, None] == self.stop_ids).any(-1)
        self.done |= stopped | (self.counts >= self.limits)

    def choose(self, logits: Tensor, greedy: bool) -> Tensor:
        """[slots, vocabulary] -> [slots]: the argmax, or argmax(logits / T + Gumbel noise)."""
        if greedy:
            return logits.argmax(-1)
        logits = logits.float()
        noise = torch.empty_like(logits).exponential_(generator=self.generator)
        noise = noise.clamp_min_(SMALLEST_NOISE).log_()
        sampled = (self.temperatures > 0)[:, None]
        temperatures = torch.where(sampled, self.temperatures[:, None], 1.0)
        return (logits / temperatures).sub_(noise.mul_(sampled)).argmax(-1)

    def snapshot(self, tail: int) -> SlotSnapshot:
        """Read the state of all slots, with the last `tail` tokens; waits for the device."""
        positions = self.counts[:, None] - tail + torch.arange(tail, device=self.counts.device)
        tokens = self.answers.gather(1, positions.clamp_min(0))
        tails = torch.where(positions < 0, positions, tokens)
        packed = torch.cat([self.done[:, None], self.counts[:, None], tails], 1).cpu().numpy()
        return SlotSnapshot(packed[:, 0].astype(bool), packed[:, 1], packed[:, 2:])

    def read_answers(self, slots: list[int], tokens: int) -> list[list[int]]:
        """The first `tokens` tokens of these slots' answers."""
        return self.answers[self._upload(slots), :tokens].tolist()

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Capture the CUDA graphs. Every slot must be idle."""
        if self.tokens.device.type != "cuda":
            return
        for greedy in (True, False):
            work = partial(self.step, greedy)
            self.graphs.warm_up(work)
            self.graphs.capture(greedy, work)

    def _upload(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.tokens.device)

    def _decode_rows(self) -> RowPass:
        """One row per slot, at position `lengths`."""
        return RowPass(
            self.lengths,
            self.first_kv_slots + self.lengths,
            self.page_tables,
            self.slot_rows,
            self.one_row,
            self.lengths.int(),
            1,
            PAGE_SIZE,
        )

    def _prefill_rows(self, slots: list[int], stored: list[int], index: Tensor) -> RowPass:
        """The rows of all prompts, one prompt after another, without padding."""
        positions = self._upload([position for count in stored for position in range(count)])
        counts = self._upload(stored)
        owners = index.repeat_interleave(counts, output_size=sum(stored))
        return RowPass(
            positions,
            self.first_kv_slots[owners] + positions,
            self.page_tables[index],
            (counts.cumsum(0) - counts).int(),
            counts.int(),
            torch.zeros_like(counts).int(),
            max(stored),
            PAGE_SIZE,
        )
