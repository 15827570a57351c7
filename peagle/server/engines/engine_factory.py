"""EngineFactory: the pair that a server has loaded, and the engines that are built for it."""

import time
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

from peagle.core import DRAFTER_METHODS, Method
from peagle.engine.gc_tuning import collection_paused, freeze_live_objects, trim_heap
from peagle.errors import UserError
from peagle.server.engines.method_choice import choose_method
from peagle.server.messages import EngineKey
from peagle.server.settings import ServerSettings
from peagle.target.preload import preload
from peagle.target.transformers_import import quick_imports

if TYPE_CHECKING:
    from peagle.engine import Engine
    from peagle.loaded import LoadedPair

EXTRA_KV_TOKENS = 1 << 13  # Positions in the KV cache of an extra engine.
EXTRA_MAX_BATCH = 16  # Requests that an extra engine runs at once.
READY_BATCH = 8  # A server is ready when the CUDA graphs for this many requests are captured.


class EngineFactory:
    def __init__(
        self, settings: ServerSettings, loader: "Callable[[], LoadedPair] | None" = None
    ) -> None:
        self.settings = settings
        self.pair: LoadedPair | None = None
        self.key = EngineKey("none", 0)  # The main engine's, once the pair is loaded.
        self.methods: tuple[Method, ...] = ()  # The methods that a request may choose.
        self._loader = loader or (lambda: load_pair(settings))
        self._phases: dict[str, float] = {}  # Seconds of the start so far.

    def load(self) -> "LoadedPair":
        started = time.perf_counter()
        import_models(self.settings.device)
        imported = time.perf_counter()
        self.pair = pair = self._loader()
        self._phases = {"import": imported - started, "load": time.perf_counter() - imported}
        if pair.target.tokenizer is None:
            raise UserError(
                f"target {pair.target.name!r} has no tokenizer: put its files into the target's"
                " folder"
            )
        self.key, self.methods = choose_method(self.settings, pair.pair)
        return pair

    def build_main(self) -> "Engine":
        engine = self.build(self.key, self.settings.kv_tokens, self.settings.max_batch)
        for phase, seconds in self._phases.items():
            engine.startup.add(phase, seconds)
        engine.warm_up(READY_BATCH)
        trim_heap()
        return engine

    def build_extra(self, key: EngineKey) -> "Engine":
        kv_tokens = max(EXTRA_KV_TOKENS, self.settings.context or 0)
        kv_tokens = min(kv_tokens, self.settings.kv_tokens or kv_tokens)
        return self.build(key, kv_tokens, min(EXTRA_MAX_BATCH, self.settings.max_batch))

    def build(self, key: EngineKey, kv_tokens: int | None, max_batch: int) -> "Engine":
        """Build an engine without a thread of its own: the driver runs its steps."""
        from peagle.engine import Engine, EngineConfig

        pair = self.pair
        assert pair is not None, "the pair is not loaded yet"
        settings = self.settings
        # Only the server's own method and K draft trees; others draft chains.
        trees = key == (self.key.method, settings.k)
        config = EngineConfig(
            method=key.method,
            k=key.k or "auto",
            tree=settings.tree if trees else 0,
            ngram=settings.ngram if key.method in DRAFTER_METHODS else None,
            drafter_window=settings.drafter_window,
            max_batch=max_batch,
            context=settings.context,
            kv_tokens=kv_tokens,
            reserved_gib=settings.learn_memory if settings.learn else 0.0,
            prefill_chunk=settings.chunk,
            max_queue=settings.max_queue,
            exact=settings.exact,
            int8=settings.int8,
            prefix_caching=settings.prefix_caching,
            cuda_graphs=settings.graphs,
            thread=False,
        )
        return Engine(pair, config)

    def engine_name(self, key: EngineKey) -> str:
        """Such as "p-eagle", or "p-eagle k=3" where K is not the server's own."""
        return key.method if key.k in (0, self.settings.k) else f"{key.method} k={key.k}"


def import_models(device: str) -> None:
    """Import torch, and what loads models."""
    with collection_paused():
        preload(device)
        import_module("torch")
        with quick_imports():
            import_module("peagle.loaded")


def load_pair(settings: ServerSettings) -> "LoadedPair":
    from peagle.loaded import load_with_drafters

    pair = load_with_drafters(
        settings.pair,
        settings.target,
        settings.drafter,
        settings.device,
        settings.dtype,
        settings.context,
    )
    freeze_live_objects()
    return pair
