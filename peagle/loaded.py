"""LoadedPair: what `peagle.load` returns, a pair that generates one answer at a time."""

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from peagle.catalog import DEFAULT_PAIR, find
from peagle.catalog.pair import DrafterSource, Pair
from peagle.core import Generation, Method, Sampling, Step, check_k, parse_method
from peagle.draft_shape import check_tree_nodes
from peagle.drafter import Drafter
from peagle.drafter.formats import checkpoint
from peagle.engine import Engine, EngineConfig
from peagle.errors import UserError
from peagle.grammar import Grammar
from peagle.model_pair import ModelPair, Prompt, load_models
from peagle.progress import Progress, silent
from peagle.reference.decode import check_request
from peagle.target import Target

SMALLEST_ENGINE_TOKENS = 4096


class LoadedPair(ModelPair):
    """Generates one answer at a time; an `Engine` runs many requests at once."""

    def __init__(
        self, pair: Pair, target: Target, drafters: dict[Method, Drafter] | None = None
    ) -> None:
        super().__init__(pair, target, drafters)
        self._engines: dict[tuple[Any, ...], Engine] = {}

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
        on_text: Callable[[str], None] | None = None,
        grammar: Grammar | None = None,
        **sampling: Any,
    ) -> Generation:
        """The target's answer; `on_text` receives it as it grows.

        `exact`: bit-equal with and without drafts, in any dtype; None: where it is needed and can be had.
        `int8`: matrices in 8 bits, on a CPU. `tree`: drafts are a tree of so many nodes; 0: a chain.
        `sampling`: the fields of core.Sampling.
        """
        chosen = parse_method(method or self.pair.method)
        k = check_k(self.pair.k if k is None else k) if chosen != "none" else 0
        check_tree_nodes(tree, (k,), chosen, exact)
        settings = Sampling(**sampling).seeded()
        ids = self.encode(prompt, raw)
        check_request(self.target, ids, max_tokens)
        room = min(len(ids) + max_tokens, self.target.context) + max(2 * k, 2 * tree)
        engine = self.engine(chosen, k, exact, room, int8, tree)
        start, prefill, steps, reason = time.perf_counter(), 0.0, list[Step](), None
        stream = engine.add(ids, max_tokens=max_tokens, grammar=grammar, **asdict(settings))
        try:
            while not stream.ended:
                engine.step()
                for piece in stream.poll():
                    reason = piece.reason
                    prefill = prefill or time.perf_counter() - start
                    steps += [piece.step] if piece.step else []
                    if on_text and piece.text:
                        on_text(piece.text)
        finally:
            stream.abort()  # Ctrl-C: the next call begins with nothing under way
        tokens = [token for step in steps for token in step.tokens]
        return Generation(
            text=self.decode(tokens),
            token_ids=tokens,
            prompt_tokens=len(ids),
            steps=steps,
            finish_reason="stop" if reason == "stop" else "length",
            method=chosen,
            k=k,
            seconds=time.perf_counter() - start,
            prefill_seconds=prefill,
            seed=settings.seed,
            dtype=str(self.target.dtype).removeprefix("torch."),
            weights=engine.weights,
            exact=engine.exact,
            trained=chosen == "none" or self.drafter(chosen).config.trained,
            tree=tree,
        )

    def engine(
        self,
        method: Method,
        k: int,
        exact: bool | None,
        positions: int,
        int8: bool = False,
        tree: int = 0,
    ) -> Engine:
        """An engine for one request at a time, kept for the next one that fits it."""
        size = 1 << max(positions - 1, SMALLEST_ENGINE_TOKENS - 1).bit_length()
        key = (method, k, exact, size, int8, tree)
        if key not in self._engines:
            config = EngineConfig(
                method=method,
                k=k or 1,
                tree=tree,
                max_batch=1,
                kv_tokens=size,
                exact=exact,
                int8=int8,
                prefix_caching=False,
                thread=False,
            )
            self._engines[key] = Engine(self, config)
        return self._engines[key]


def load(
    pair: str | Pair = DEFAULT_PAIR,
    *,
    target: str | Path | None = None,
    drafter: str | Path | None = None,
    device: str = "auto",
    dtype: str = "auto",
    progress: Progress = silent,
) -> LoadedPair:
    """Load a pair by name (downloaded if necessary), or by the folder of a target.

    `target` and `drafter` are folders that replace the pair's own.
    """
    models = load_models(
        pair, target=target, drafter=drafter, device=device, dtype=dtype, progress=progress
    )
    return LoadedPair(models.pair, models.target, models.loaded_drafters)


def load_with_drafters(
    pair: str,
    target: str | None,
    drafters: str | None,
    device: str,
    dtype: str,
    progress: Progress = silent,
) -> LoadedPair:
    """`drafters`: folders by commas, one a method, instead of the pair's."""
    if drafters is None:
        return load(pair, target=target, device=device, dtype=dtype, progress=progress)
    bare = replace(find(pair), drafters={})  # the pair's own need not be fetched
    loaded = load(bare, target=target, device=device, dtype=dtype, progress=progress)
    sources, models = dict[Method, DrafterSource](), dict[Method, Drafter]()
    for folder in (Path(word.strip()).expanduser() for word in drafters.split(",")):
        found = checkpoint.load(folder, loaded.target, loaded.target.dtype)
        if found.config.method in models:
            raise UserError(
                f"two {found.config.method} drafters are given: measure them in two runs (--name)"
            )
        models[found.config.method], sources[found.config.method] = (
            found,
            DrafterSource(folder=folder),
        )
    return LoadedPair(replace(loaded.pair, drafters=sources), loaded.target, models)
