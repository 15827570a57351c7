"""The decode step of all slots: embed, layers, choose a token, write it down; no host in it, so one CUDA graph.

The state of a slot, all on the device: `tokens` is fed next, at position `cache.lengths`; `answers[:counts]` is what it
said. A slot that is `done` computes on, for a step has one shape, but nothing of its state changes.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peagle.regenerate.slots import SlotCache
from peagle.target import Target

TINY = 1e-20
WARM_UPS = (
    3  # eager steps before the capture: kernels are compiled and workspaces allocated in them
)


class DecodeStep:
    def __init__(self, target: Target, slots: int, capacity: int, seed: int = 0) -> None:
        device = target.device
        self.target = target
        self.cache = SlotCache(len(target.layers), slots, capacity, device)
        self.tokens = torch.zeros(slots, dtype=torch.long, device=device)
        self.counts = torch.zeros(slots, dtype=torch.long, device=device)
        self.limits = torch.zeros(slots, dtype=torch.long, device=device)
        self.temperatures = torch.zeros(slots, device=device)
        self.done = torch.ones(slots, dtype=torch.bool, device=device)
        self.answers = torch.zeros(slots, capacity, dtype=torch.long, device=device)
        self.stops = torch.tensor(sorted(target.stop_ids), dtype=torch.long, device=device)
        self.graphs: dict[bool, Any] = {}  # greedy or not -> torch.cuda.CUDAGraph
        self.generator: torch.Generator | None = None
        if device.type == "cuda":
            torch.cuda.manual_seed(seed)  # a graph replays with the default generator
        else:
            self.generator = torch.Generator(device).manual_seed(seed)

    @torch.inference_mode()
    def prefill(self, slots: list[int], prompts: list[list[int]], width: int) -> None:
        """Stores all but the last token of each prompt; that one is what the slot's first step is fed.

        So no logits are needed here, and the first token of an answer is chosen like every other.
        """
        device = self.tokens.device
        padded = torch.zeros(len(slots), width, dtype=torch.long)
        for row, ids in zip(padded, prompts, strict=True):
            row[: len(ids) - 1] = torch.tensor(ids[:-1], dtype=torch.long)
        index = torch.tensor(slots, device=device)
        self.cache.filling = index
        try:
            decoder: Any = self.target.model.get_decoder()
            decoder(input_ids=padded.to(device), past_key_values=self.cache, use_cache=True)
        finally:
            self.cache.filling = None
        self.cache.lengths[index] = torch.tensor([len(ids) - 1 for ids in prompts], device=device)
        self.tokens[index] = torch.tensor([ids[-1] for ids in prompts], device=device)

    def start(self, slots: list[int], limits: list[int], temperatures: list[float]) -> None:
        """From the next step on these slots answer."""
        device = self.tokens.device
        index = torch.tensor(slots, device=device)
        self.limits[index] = torch.tensor(limits, device=device)
        self.temperatures[index] = torch.tensor(temperatures, dtype=torch.float32, device=device)
        self.counts[index] = 0
        self.done[index] = False

    def free(self, slots: list[int]) -> None:
        """These slots idle from now on, and read no more keys than one."""
        index = torch.tensor(slots, device=self.tokens.device)
        self.done[index] = True
        self.cache.lengths[index] = 0

    def look(self, tail: int) -> tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[np.int64]]:
        """done [slots], counts [slots] and the last `tail` tokens of each slot; waits for the device."""
        at = self.counts[:, None] - tail + torch.arange(tail, device=self.counts.device)
        said = torch.where(
            at < 0, at, self.answers.gather(1, at.clamp_min(0))
        )  # before the first: no token, no repeat
        packed = torch.cat([self.done[:, None], self.counts[:, None], said], 1).cpu().numpy()
        return packed[:, 0].astype(bool), packed[:, 1], packed[:, 2:]

    def said(self, slots: list[int], tokens: int) -> list[list[int]]:
        """The first `tokens` tokens of these slots' answers."""
        return self.answers[
            torch.tensor(slots, dtype=torch.long, device=self.answers.device), :tokens
        ].tolist()

    def run(self, steps: int, greedy: bool) -> None:
        """`steps` tokens for every live slot; on CUDA it returns before they are computed."""
        graph = self.graphs.get(greedy)
        for _ in range(steps):
            if graph is not None:
                graph.replay()
            else:
                self.once(greedy)

    @torch.inference_mode()
    def once(self, greedy: bool) -> None:
        lengths = self.cache.lengths
        model: Any = self.target.model
        out = model(
            input_ids=self.tokens[:, None],
            position_ids=lengths[:, None],
            past_key_values=self.cache,
            use_cache=True,
            slot_lengths=lengths,
        )
        chosen = self.choose(out.logits[:, -1], greedy)
        live = ~self.done
        place = (self.cache.rows, self.counts)
        self.answers[place] = torch.where(live, chosen, self.answers[place])
        self.tokens.copy_(torch.where(live, chosen, self.tokens))
        self.counts += live
        lengths += live
        stopped = (chosen[:, None] == self.stops).any(-1)
        self.done |= stopped | (self.counts >= self.limits)

    def choose(self, logits: Tensor, greedy: bool) -> Tensor:
        """[slots, vocabulary] -> [slots]: the likeliest; where hot, argmax(logits / T + Gumbel noise), a sample."""
        if greedy:
            return logits.argmax(-1)
        logits = logits.float()
        noise = (
            torch.empty_like(logits).exponential_(generator=self.generator).clamp_min_(TINY).log_()
        )
        hot = (self.temperatures > 0)[:, None]
        heat = torch.where(hot, self.temperatures[:, None], 1.0)
        return (logits / heat).sub_(noise.mul_(hot)).argmax(-1)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Once, while every slot is idle: the cache is allocated and, on CUDA, the step captured."""
        self.prefill([0], [[0]], width=min(32, self.cache.capacity))
        if self.tokens.device.type != "cuda":
            return
        for greedy in (True, False):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    self.once(greedy)
            torch.cuda.current_stream().wait_stream(stream)
            self._capture(greedy)

    def _capture(self, greedy: bool) -> None:
        graph = torch.cuda.CUDAGraph()
        pool = next((other.pool() for other in self.graphs.values()), None)
        try:
            with torch.cuda.graph(graph, pool=pool):
                self.once(greedy)
        except torch.OutOfMemoryError:
            raise
        except (
            RuntimeError
        ):  # a target whose pass asks the host, as some mixtures of experts: step by step then
            torch.cuda.synchronize()
            return
        self.graphs[greedy] = graph
