"""Engines for every method and form, kept as long as memory allows."""

import gc
import os
from collections import OrderedDict

import torch

from peagle.core import Method
from peagle.engine import Engine, EngineConfig
from peagle.engine.step.stepper_size import kv_shapes
from peagle.loaded import LoadedPair

SHARE = 0.6  # of the free memory may be taken by engines
SLACK = 128  # positions beside a request's own: the largest tree, twice


class EnginePool:
    """Engines by method, K and nodes; the one not used for longest goes when the next does not fit beside it."""

    def __init__(
        self, loaded: LoadedPair, batch: int, longest: int, tokens: int, exact: bool
    ) -> None:
        self.loaded, self.batch, self.longest, self.exact = loaded, batch, longest, exact
        self.tokens = tokens
        self.engines: OrderedDict[tuple[str, int | str, int], Engine] = OrderedDict()
        self.bytes: dict[tuple[str, int | str, int], int] = {}
        self.budget = int(SHARE * free_memory(loaded.target.device))

    def engine(self, method: str, k: int | str, tree: int = 0) -> Engine:
        name = (method, k, tree)
        if name not in self.engines:
            self._make_room(self._estimate(method))
            before = allocated(self.loaded.target.device)
            self.engines[name] = engine = self._build(method, k, tree)
            engine.warm_up()
            taken = allocated(self.loaded.target.device) - before
            self.bytes[name] = taken or self._estimate(method)
        self.engines.move_to_end(name)
        return self.engines[name]

    def memory(self, engine: Engine) -> int:
        """The most that was allocated, without the engines that wait their turn."""
        others = sum(self.bytes[name] for name, one in self.engines.items() if one is not engine)
        return int(torch.cuda.max_memory_allocated(self.loaded.target.device)) - others

    def close(self) -> None:
        self._make_room(self.budget)

    def _build(self, method: str, k: int | str, tree: int) -> Engine:
        each = self._each(method)
        tokens = max(self.longest + SLACK, min(self.tokens, self.budget // each))
        slack = 2 * k if isinstance(k, int) and not tree else SLACK
        config = EngineConfig(
            method=method,
            k=k or "auto",
            tree=tree,
            max_batch=self.batch,
            context=min(self.loaded.target.context, self.longest + slack),
            kv_tokens=tokens,
            max_queue=max(1024, self.batch),
            exact=self.exact,
            prefix_caching=False,
            thread=False,
        )
        return Engine(self.loaded, config)

    def _each(self, method: str) -> int:
        """Bytes of a position."""
        chosen: Method | None = None if method == "none" else method  # type: ignore[assignment]
        drafter = None if chosen is None else self.loaded.drafter(chosen)
        return sum(shape.bytes for shape in kv_shapes(self.loaded.target, drafter))

    def _estimate(self, method: str) -> int:
        """Keys and values; on a CPU in half precision also the matrices, laid out anew (engine/weight.py)."""
        target = self.loaded.target
        copied = target.device.type == "cpu" and target.dtype != torch.float32
        weights = (
            sum(p.numel() * p.element_size() for p in target.model.parameters()) if copied else 0
        )
        return min(self.tokens * self._each(method), self.budget) + weights

    def _make_room(self, needed: int) -> None:
        while self.engines and sum(self.bytes.values()) + needed > self.budget:
            name, engine = self.engines.popitem(last=False)
            del self.bytes[name]
            engine.close()
            del engine
            gc.collect()
            if self.loaded.target.device.type == "cuda":
                torch.cuda.empty_cache()


def allocated(device: torch.device) -> int:
    return int(torch.cuda.memory_allocated(device)) if device.type == "cuda" else 0


def free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 8 << 30
