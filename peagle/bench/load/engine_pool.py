"""EnginePool: an engine for every method and draft form, kept as long as memory allows."""

import gc
import os
from collections import OrderedDict

import torch

from peagle.core import DRAFTER_METHODS, parse_method
from peagle.engine import Engine, EngineConfig
from peagle.engine.step.stepper_size import kv_shapes
from peagle.loaded import LoadedPair
from peagle.target.gguf.modules import weight_bytes

ENGINE_MEMORY_FRACTION = 0.6  # of the free memory
EXTRA_POSITIONS = 128  # beside a request's own: the largest tree, twice
UNKNOWN_FREE_BYTES = 8 << 30

EngineKey = tuple[str, int | str, int]  # method, K, tree nodes


class EnginePool:
    """Engines by method, K and tree nodes.

    The least recently used one is closed when the next does not fit beside it.
    """

    def __init__(
        self,
        loaded: LoadedPair,
        max_batch: int,
        max_length: int,
        kv_tokens: int,
        exact: bool | None,
        ngram: bool | None = None,
    ) -> None:
        self.loaded = loaded
        self.max_batch = max_batch
        self.max_length = max_length  # positions of the longest request
        self.kv_tokens = kv_tokens  # positions of all requests of a batch
        self.exact = exact  # None: the engine decides
        self.ngram = ngram  # n-gram drafts beside those of a drafter; None: the engine decides
        self.engines: OrderedDict[EngineKey, Engine] = OrderedDict()
        self.engine_bytes: dict[EngineKey, int] = {}
        self.budget_bytes = int(ENGINE_MEMORY_FRACTION * free_bytes(loaded.target.device))

    def engine(self, method: str, k: int | str, tree: int = 0) -> Engine:
        key = (method, k, tree)
        if key not in self.engines:
            self._free(self._estimate_bytes(method))
            before = allocated_bytes(self.loaded.target.device)
            self.engines[key] = engine = self._build(method, k, tree)
            engine.warm_up()
            allocated = allocated_bytes(self.loaded.target.device) - before
            self.engine_bytes[key] = allocated or self._estimate_bytes(method)
        self.engines.move_to_end(key)
        return self.engines[key]

    def peak_memory(self, engine: Engine) -> int:
        """The peak of the allocated bytes, without those of the other engines of the pool."""
        others = sum(
            self.engine_bytes[key] for key, other in self.engines.items() if other is not engine
        )
        return int(torch.cuda.max_memory_allocated(self.loaded.target.device)) - others

    def close(self) -> None:
        self._free(self.budget_bytes)

    def _build(self, method: str, k: int | str, tree: int) -> Engine:
        affordable = self.budget_bytes // self._position_bytes(method)
        extra = 2 * k if isinstance(k, int) and not tree else EXTRA_POSITIONS
        config = EngineConfig(
            method=method,
            k=k or "auto",
            tree=tree,
            ngram=self.ngram if method in DRAFTER_METHODS else None,
            max_batch=self.max_batch,
            context=self.loaded.target.fit_context(self.max_length + extra),
            kv_tokens=max(self.max_length + EXTRA_POSITIONS, min(self.kv_tokens, affordable)),
            max_queue=max(1024, self.max_batch),
            exact=self.exact,
            prefix_caching=False,
            thread=False,
        )
        return Engine(self.loaded, config)

    def _position_bytes(self, method: str) -> int:
        """Bytes of the keys and values of one position."""
        name = parse_method(method)
        drafter = self.loaded.drafter(name) if name in DRAFTER_METHODS else None
        return sum(shape.bytes for shape in kv_shapes(self.loaded.target, drafter))

    def _estimate_bytes(self, method: str) -> int:
        """Keys and values; on a CPU in half precision also the repacked weight matrices."""
        target = self.loaded.target
        kv_bytes = min(self.kv_tokens * self._position_bytes(method), self.budget_bytes)
        if target.device.type != "cpu" or target.dtype == torch.float32:
            return kv_bytes
        return kv_bytes + weight_bytes(target.model)

    def _free(self, needed_bytes: int) -> None:
        """Close engines until this many bytes fit into the budget."""
        while self.engines and sum(self.engine_bytes.values()) + needed_bytes > self.budget_bytes:
            key, engine = self.engines.popitem(last=False)
            del self.engine_bytes[key]
            engine.close()
            del engine
            gc.collect()
            if self.loaded.target.device.type == "cuda":
                torch.cuda.empty_cache()


def allocated_bytes(device: torch.device) -> int:
    return int(torch.cuda.memory_allocated(device)) if device.type == "cuda" else 0


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return UNKNOWN_FREE_BYTES
