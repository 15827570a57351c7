"""A pair in memory, ready to generate: what `peagle.load` returns."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from peagle.catalog import DEFAULT_PAIR, find
from peagle.catalog.pair import DrafterSource, Pair
from peagle.catalog.tuned import machine_of, read_tuned
from peagle.core import Generation, Method, Sampling, Step, check_k, check_tree_nodes, parse_method
from peagle.drafter import Drafter
from peagle.drafter.config import config_for
from peagle.drafter.formats import checkpoint
from peagle.drafter.untrained import untrained
from peagle.errors import UserError
from peagle.grammar import Grammar, Grammars
from peagle.pull import pull, pull_drafter, receipt
from peagle.pull.progress import Progress, silent
from peagle.reference.decode import check_request
from peagle.target import Target, load_target
from peagle.target.precision import choose_dtype

if TYPE_CHECKING:
    from peagle.engine import Engine

SMALL = 4096  # positions an engine holds at least

Prompt = str | list[dict[str, str]] | list[int]  # a user's words, chat messages, or token ids


class LoadedPair:
    """One generation at a time; an `Engine` takes many."""

    def __init__(
        self, pair: Pair, target: Target, drafters: dict[Method, Drafter] | None = None
    ) -> None:
        self.pair, self.target = pair, target
        self._drafters = dict(drafters or {})
        self._engines: dict[tuple[Any, ...], Engine] = {}
        self.grammars = Grammars(target)

    def drafter(self, method: Method) -> Drafter:
        """Loaded when first asked for; untrained where the pair has no trained one yet."""
        if method not in self._drafters:
            source = self.pair.drafter(method)
            folder = pull_drafter(self.pair, method)
            if folder is not None:
                self._drafters[method] = checkpoint.load(folder, self.target, self.target.dtype)
            else:
                config = config_for(
                    self.target,
                    method,
                    source.layers,
                    source.aux_layer_ids,
                    source.mask_token_id,
                    trained=False,
                )
                self._drafters[method] = untrained(config, self.target, source.seed)
        return self._drafters[method]

    def encode(self, prompt: Prompt, raw: bool = False) -> list[int]:
        """Token ids of a user's words or a list of chat messages, under the chat template unless `raw`."""
        if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
            return prompt  # type: ignore[return-value]
        tokenizer = self.target.tokenizer
        if tokenizer is None:
            raise UserError(
                f"target {self.target.name!r} has no tokenizer: pass token ids as `prompt`"
            )
        if raw:
            if not isinstance(prompt, str):
                raise UserError("a raw prompt is a text, not a list of messages: drop raw (--raw)")
            return tokenizer(prompt)["input_ids"]
        if not tokenizer.chat_template:
            raise UserError(
                f"target {self.target.name!r} has no chat template: use raw=True (--raw)"
            )
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            return tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        except Exception as error:  # jinja raises whatever the template's author chose
            raise UserError(
                f"the prompt does not fit the chat template of {self.target.name!r}: {error}"
            ) from error

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
                for piece in stream.waiting():
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
    ) -> "Engine":
        """An engine for one request at a time, kept for the next one that fits it."""
        from peagle.engine import Engine

        size = 1 << max(positions - 1, SMALL - 1).bit_length()
        key = (method, k, exact, size, int8, tree)
        if key not in self._engines:
            self._engines[key] = Engine(
                self,
                method=method,
                k=k or 1,
                tree=tree,
                max_batch=1,
                tokens=size,
                exact=exact,
                int8=int8,
                prefix_caching=False,
                thread=False,
            )
        return self._engines[key]

    def decode(self, tokens: Sequence[int]) -> str:
        if self.target.tokenizer is None:
            return ""
        return self.target.tokenizer.decode(tokens, skip_special_tokens=True)


def load(
    pair: str | Pair = DEFAULT_PAIR,
    *,
    target: str | Path | None = None,
    drafter: str | Path | None = None,
    device: str = "auto",
    dtype: str = "auto",
    progress: Progress = silent,
) -> LoadedPair:
    """A pair by name (pulled if need be), by a target's folder, or with another target or drafter folder."""
    pair = find(pair) if isinstance(pair, str) else pair
    device = choose_device(device)
    source = find(str(target)) if target else pair
    folder = pull(source, progress=progress)
    found = receipt(folder) or {}
    name = source.target.hub or source.name
    chosen = choose_dtype(dtype, device)
    if target is None and drafter is None:  # what was tuned holds for the pair's own two
        pair = replace(pair, k_by_concurrency=read_tuned(pair, machine_of(device, chosen)))
        if pair.method in pair.drafters:
            own = replace(
                pair.drafters[pair.method], folder=pull_drafter(pair, pair.method, progress)
            )
            pair = replace(pair, drafters={**pair.drafters, pair.method: own})
    loaded = LoadedPair(pair, load_target(folder, chosen, device, name, found.get("revision")))
    if drafter is not None:
        folder = Path(drafter).expanduser()
        given = checkpoint.load(folder, loaded.target, loaded.target.dtype)
        method = given.config.method
        pair = replace(pair, method=method, drafters={method: DrafterSource(folder=folder)})
        loaded = LoadedPair(pair, loaded.target, {method: given})
    return loaded


def choose_device(wanted: str) -> str:
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=wanted)
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"device {wanted!r} cannot be used here: use cpu, or cuda on a machine with a GPU"
        ) from error
    return wanted
