"""ModelPair: a target and its drafters in memory, with the target's tokenizer and grammars."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from peagle.catalog import DEFAULT_PAIR, find_pair
from peagle.catalog.pair import DrafterSource, Pair
from peagle.catalog.tuned import machine_of, read_tuned
from peagle.core import Method
from peagle.drafter import Drafter
from peagle.drafter.config import config_for
from peagle.drafter.formats import checkpoint
from peagle.drafter.replacement import check_replacement
from peagle.drafter.untrained import untrained_drafter
from peagle.errors import UserError
from peagle.grammar import GrammarCompiler
from peagle.progress import Progress, silent
from peagle.pull import has_stored, pull, pull_drafter, receipt
from peagle.target import Target, load_target
from peagle.target.gguf.choice import choose_weights

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
        """The drafter of a method, loaded on first use; untrained if the pair has none yet."""
        if method not in self._drafters:
            self._drafters[method] = self._load_drafter(method)
        return self._drafters[method]

    def replace_drafter(self, method: Method, drafter: Drafter) -> None:
        """Give another version of the drafter to engines that are built from now on.

        `Engine.replace_drafter` gives it to one that runs.
        """
        check_replacement(self.drafter(method), drafter, self.target)
        self._drafters[method] = drafter

    def _load_drafter(self, method: Method) -> Drafter:
        source = self.pair.drafter(method)
        folder = pull_drafter(self.pair, method)
        if folder is not None:
            return checkpoint.load(folder, self.target, self.target.dtype)
        config = config_for(
            self.target,
            method,
            source.layers,
            source.aux_layer_ids,
            source.mask_token_id,
            trained=False,
        )
        return untrained_drafter(config, self.target, source.seed)

    def encode(self, prompt: Prompt, raw: bool = False) -> list[int]:
        """Token ids of a prompt; text and messages go through the chat template unless `raw`."""
        if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
            return prompt  # type: ignore[return-value]
        name = self.target.name
        tokenizer = self.target.tokenizer
        if tokenizer is None:
            raise UserError(f"target {name!r} has no tokenizer: pass token ids as `prompt`")
        if raw:
            if not isinstance(prompt, str):
                raise UserError("a raw prompt is a text, not a list of messages: leave out `raw`")
            return tokenizer(prompt)["input_ids"]
        if not tokenizer.chat_template:
            raise UserError(f"target {name!r} has no chat template: use `raw`")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            return tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        except Exception as error:  # A template may raise any error.
            raise UserError(
                f"the prompt does not fit the chat template of {name!r}: {error}"
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
    context: int | None = None,
    stored: bool = True,
    progress: Progress = silent,
) -> ModelPair:
    """Load a pair by name (downloaded if necessary), or a target by its folder or GGUF file.

    `target` and `drafter` are folders that replace the pair's own; the target may be a GGUF file.
    `context`: the most tokens of a prompt and its answer; None: what the target supports.
    `stored`: weights of a GGUF file may stay as they are stored (target/gguf/choice.py).
    """
    pair = find_pair(pair) if isinstance(pair, str) else pair
    device = choose_device(device)
    source = find_pair(str(target)) if target else pair
    folder = pull(source, progress=progress)
    origin = receipt(folder)
    revision = origin.revision if origin is not None else None
    name = source.target.hub or source.name
    weights = choose_weights(folder, dtype, device, stored, has_stored=has_stored(origin))
    is_own = target is None and drafter is None
    if is_own:
        pair = with_pulled_drafter(pair, progress)
    loaded = load_target(
        folder, weights.dtype, device, name, revision, context, stored=weights.stored
    )
    loaded.speed_choice = weights.speed
    if is_own:  # Tuning results hold for the pair's own target and drafter only.
        machine = machine_of(device, weights.dtype, loaded.stored_format)
        pair = replace(pair, k_by_concurrency=read_tuned(pair, machine))
    models = ModelPair(pair, loaded)
    return models if drafter is None else with_drafter(models, Path(drafter).expanduser())


def with_pulled_drafter(pair: Pair, progress: Progress) -> Pair:
    """The pair with the folder of its own drafter, downloaded if necessary."""
    source = pair.drafters.get(pair.method)
    if source is None:
        return pair
    source = replace(source, folder=pull_drafter(pair, pair.method, progress))
    return replace(pair, drafters={**pair.drafters, pair.method: source})


def with_drafter(models: ModelPair, folder: Path) -> ModelPair:
    """The same target with the drafter in `folder` as its only one."""
    drafter = checkpoint.load(folder, models.target, models.target.dtype)
    method = drafter.config.method
    pair = replace(models.pair, method=method, drafters={method: DrafterSource(folder=folder)})
    return ModelPair(pair, models.target, {method: drafter})


def choose_device(device: str) -> str:
    """The name of a usable device; auto: a GPU if there is one."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"device {device!r} cannot be used here: use cpu, or cuda on a machine with a GPU"
        ) from error
    return device
