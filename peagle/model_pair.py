"""ModelPair: a target and its drafters in memory, with the target's tokenizer and grammars."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from peagle.catalog import DEFAULT_PAIR, find
from peagle.catalog.pair import DrafterSource, Pair
from peagle.catalog.tuned import machine_of, read_tuned
from peagle.core import Method
from peagle.drafter import Drafter
from peagle.drafter.config import config_for
from peagle.drafter.formats import checkpoint
from peagle.drafter.untrained import untrained
from peagle.errors import UserError
from peagle.grammar import GrammarCompiler
from peagle.progress import Progress, silent
from peagle.pull import pull, pull_drafter, receipt
from peagle.target import Target, load_target
from peagle.target.precision import choose_dtype

Prompt = str | list[dict[str, str]] | list[int]  # user text, chat messages, or token ids


class ModelPair:
    def __init__(
        self, pair: Pair, target: Target, drafters: dict[Method, Drafter] | None = None
    ) -> None:
        self.pair = pair
        self.target = target
        self.grammars = GrammarCompiler(target)
        self._drafters = dict(drafters or {})

    @property
    def loaded_drafters(self) -> dict[Method, Drafter]:
        """The drafters that are in memory so far, by method."""
        return dict(self._drafters)

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

    def decode(self, tokens: Sequence[int]) -> str:
        if self.target.tokenizer is None:
            return ""
        return self.target.tokenizer.decode(tokens, skip_special_tokens=True)


def load_models(
    pair: str | Pair = DEFAULT_PAIR,
    *,
    target: str | Path | None = None,
    drafter: str | Path | None = None,
    device: str = "auto",
    dtype: str = "auto",
    progress: Progress = silent,
) -> ModelPair:
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
    loaded = ModelPair(pair, load_target(folder, chosen, device, name, found.get("revision")))
    if drafter is not None:
        folder = Path(drafter).expanduser()
        given = checkpoint.load(folder, loaded.target, loaded.target.dtype)
        method = given.config.method
        pair = replace(pair, method=method, drafters={method: DrafterSource(folder=folder)})
        loaded = ModelPair(pair, loaded.target, {method: given})
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
