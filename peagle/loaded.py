"""LoadedPair: what `peagle.load` returns, a pair that generates one answer at a time."""

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from peagle.catalog import DEFAULT_PAIR, find_pair
from peagle.catalog.pair import DrafterSource, Pair
from peagle.core import DRAFTER_METHODS, Generation, Method, Sampling, Step, check_k, parse_method
from peagle.draft_shape import MAX_ADAPTIVE_K_NGRAM, check_tree_nodes
from peagle.drafter import Drafter
from peagle.drafter.formats import checkpoint
from peagle.engine import Engine, EngineConfig
from peagle.engine.schedule.request import FinishReason
from peagle.engine.step.startup_times import StartupTimes
from peagle.engine.stream import Stream
from peagle.errors import UserError
from peagle.grammar import Grammar
from peagle.model_pair import ModelPair, Prompt, load_models
from peagle.progress import Progress, silent
from peagle.target import Target

MIN_ENGINE_TOKENS = 4096  # KV positions of the smallest engine.
MAX_ENGINES = 4  # Engines that a pair keeps; the one unused for the longest time is closed first.


@dataclass(frozen=True, slots=True)
class EngineKey:
    """What an engine for one request at a time depends on."""

    method: Method
    k: int | str  # a number, or auto
    tree: int
    exact: bool | None
    int8: bool
    kv_tokens: int
    ngram: bool | None = None

    def config(self) -> EngineConfig:
        return EngineConfig(
            method=self.method,
            k=self.k or 1,
            tree=self.tree,
            ngram=self.ngram,
            max_batch=1,
            kv_tokens=self.kv_tokens,
            exact=self.exact,
            one_by_one=True,
            int8=self.int8,
            prefix_caching=False,
            thread=False,
        )


class LoadedPair(ModelPair):
    """Generates one answer at a time; an `Engine` runs many requests at once."""

    def __init__(
        self, pair: Pair, target: Target, drafters: dict[Method, Drafter] | None = None
    ) -> None:
        super().__init__(pair, target, drafters)
        self.startup = StartupTimes()  # Of all engines; whoever loads the pair may complete it.
        self._engines: OrderedDict[EngineKey, Engine] = OrderedDict()  # The last used one is last.
        self._engine_users: Counter[EngineKey] = Counter()  # Calls that are using an engine.
        self._engines_lock = threading.Lock()

    def generate(
        self,
        prompt: Prompt,
        k: int | None = None,
        method: str | None = None,
        max_tokens: int = 128,
        raw: bool = False,
        exact: bool | None = None,
        int8: bool = False,
        tree: int = 0,
        ngram: bool | None = None,
        on_text: Callable[[str], None] | None = None,
        grammar: Grammar | None = None,
        **sampling: Any,
    ) -> Generation:
        """Generate the target's answer; `on_text` receives it as it grows.

        `k`: drafted tokens per step; None: the pair's own, on a CPU adaptive drafting.
        `exact`: bit-equal with and without drafts, in any dtype; None: where necessary and
        supported. `int8`: in 8 bits, on a CPU. `tree`: nodes of a draft tree; 0: a chain.
        `ngram`: n-gram drafts beside the drafter's; None: on a CPU if K is not given.
        `sampling`: the fields of `core.Sampling`.
        """
        parsed_method = parse_method(method or self.pair.method)
        adaptive = k is None and self._drafts_adaptively(parsed_method, tree)
        k = check_k(self.pair.k if k is None else k) if parsed_method != "none" else 0
        check_tree_nodes(tree, (k,), parsed_method)
        settings = Sampling(**sampling).seeded()
        ids = self.encode(prompt, raw)
        positions = min(len(ids) + max_tokens, self.target.context)
        tokens = engine_tokens(positions + 2 * max(k, tree, MAX_ADAPTIVE_K_NGRAM))
        key = EngineKey(parsed_method, "auto" if adaptive else k, tree, exact, int8, tokens, ngram)
        compiled = self.grammars.compile(grammar) if grammar is not None else None
        with self._engine(key) as engine:
            started = time.perf_counter()
            stream = engine.add(ids, max_tokens=max_tokens, grammar=compiled, **asdict(settings))
            answer = run_to_end(engine, stream, on_text)
            seconds = time.perf_counter() - started
        token_ids = [token for step in answer.steps for token in step.tokens]
        return Generation(
            text=self._text(token_ids, answer.reason),
            token_ids=token_ids,
            prompt_tokens=len(ids),
            steps=answer.steps,
            finish_reason="stop" if answer.reason == "stop" else "length",
            seconds=seconds,
            prefill_seconds=answer.first_piece - started,
            seed=settings.seed,
            **self._engine_facts(engine, key),
        )

    def _engine_facts(self, engine: Engine, key: EngineKey) -> dict[str, Any]:
        """The fields of `Generation` that tell how the engine ran."""
        adaptive = key.k == "auto"
        return {
            "method": key.method,
            "k": engine.max_k if adaptive else key.k,
            "adaptive": adaptive,
            "tree": key.tree,
            "dtype": str(self.target.dtype).removeprefix("torch."),
            "weights": engine.weights,
            "exact": engine.exact,
            "trained": key.method not in DRAFTER_METHODS or self.drafter(key.method).config.trained,
        }

    def _drafts_adaptively(self, method: Method, tree: int) -> bool:
        """Whether K follows the measured costs if none is given."""
        return self.target.device.type == "cpu" and method != "none" and tree == 0

    def _text(self, tokens: list[int], reason: FinishReason | None) -> str:
        """The text of an answer; that of a stop token at its end does not belong to it."""
        if reason == "stop" and tokens[-1] in self.target.stop_ids:
            return self.decode(tokens[:-1])
        return self.decode(tokens)

    @contextmanager
    def _engine(self, key: EngineKey) -> Iterator[Engine]:
        """The engine for this key, kept for the next call; it stays open inside the block."""
        with self._engines_lock:
            if key not in self._engines:
                self._close_idle_engines(MAX_ENGINES - 1)
                self._engines[key] = engine = Engine(self, key.config())
                engine.compile_kernels()
                self.startup.add_all(engine.startup)
            self._engines.move_to_end(key)
            engine = self._engines[key]
            self._engine_users[key] += 1
        try:
            yield engine
        finally:
            with self._engines_lock:
                self._engine_users[key] -= 1

    def replace_drafter(self, method: Method, drafter: Drafter) -> None:
        """Generate with another version of the drafter from now on."""
        super().replace_drafter(method, drafter)
        with self._engines_lock:
            for key, engine in self._engines.items():
                if key.method == method:
                    engine.replace_drafter(drafter)

    def _close_idle_engines(self, keep: int) -> None:
        """Close the engines unused for the longest time; one that is answering stays open."""
        idle = [key for key in self._engines if not self._engine_users[key]]
        for key in idle[: max(len(self._engines) - keep, 0)]:
            self._engines.pop(key).close()


def engine_tokens(positions: int) -> int:
    """KV positions of an engine: a power of two, so that few engines serve all lengths."""
    return 1 << max(positions - 1, MIN_ENGINE_TOKENS - 1).bit_length()


@dataclass(slots=True)
class Answer:
    steps: list[Step]
    reason: FinishReason | None
    first_piece: float  # The time when the first piece arrived.


def run_to_end(engine: Engine, stream: Stream, on_text: Callable[[str], None] | None) -> Answer:
    """Run the engine until the stream has ended."""
    answer = Answer([], None, 0.0)
    try:
        while not stream.ended:
            engine.step()
            for piece in stream.poll():
                answer.reason = piece.reason
                answer.first_piece = answer.first_piece or time.perf_counter()
                if piece.step:
                    answer.steps.append(piece.step)
                if on_text and piece.text:
                    on_text(piece.text)
    finally:
        stream.abort()  # After Ctrl-C, the next call begins with an idle engine.
    return answer


def load(
    pair: str | Pair = DEFAULT_PAIR,
    *,
    target: str | Path | None = None,
    drafter: str | Path | None = None,
    device: str = "auto",
    dtype: str = "auto",
    context: int | None = None,
    stored: bool = True,
    progress: Progress = silent,
) -> LoadedPair:
    """Load a pair by name (downloaded if necessary), or a target by its folder or GGUF file.

    `target` and `drafter` are folders that replace the pair's own; the target may be a GGUF file.
    `context`: the most tokens of a prompt and its answer; None: what the target supports.
    `stored`: weights of a GGUF file may stay as they are stored (target/gguf/choice.py).
    """
    models = load_models(
        pair,
        target=target,
        drafter=drafter,
        device=device,
        dtype=dtype,
        context=context,
        stored=stored,
        progress=progress,
    )
    return LoadedPair(models.pair, models.target, models.loaded_drafters)


def load_with_drafters(
    pair: str,
    target: str | None,
    drafters: str | None,
    device: str,
    dtype: str,
    context: int | None = None,
    progress: Progress = silent,
) -> LoadedPair:
    """Load a pair; `drafters`: folders separated by commas, one per method, instead of its own."""
    options: dict[str, Any] = {
        "target": target,
        "device": device,
        "dtype": dtype,
        "context": context,
        "progress": progress,
    }
    if drafters is None:
        return load(pair, **options)
    bare = replace(find_pair(pair), drafters={})  # The pair's own drafters need not be downloaded.
    loaded = load(bare, **options)
    sources: dict[Method, DrafterSource] = {}
    models: dict[Method, Drafter] = {}
    for name in drafters.split(","):
        folder = Path(name.strip()).expanduser()
        drafter = checkpoint.load(folder, loaded.target, loaded.target.dtype)
        method = drafter.config.method
        if method in models:
            raise UserError(f"two {method} drafters are given in `drafter`: use one per method")
        models[method] = drafter
        sources[method] = DrafterSource(folder=folder)
    return LoadedPair(replace(loaded.pair, drafters=sources), loaded.target, models)
