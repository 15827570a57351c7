"""The target: any transformers causal LM, with taps on the residual stream.

Tap `l` is the un-normed residual stream *entering* decoder layer `l` (transformers'
`hidden_states[l]`, vLLM's aux layer id `l`), taken by a hook in the forward pass that computes the
logits: no second pass, no other layer kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from peagle.errors import UserError
from peagle.target.cache import RollbackCache
from peagle.target.quantized.read import attach, format_name, quantization_of, read

NO_LIMIT = 1 << 20  # the context of a target that does not say


@dataclass(slots=True)
class TargetOutput:
    logits: Tensor  # [kept rows, vocabulary]
    hidden: Tensor  # [rows, taps * d]: g, the taps side by side; [rows, 0] without taps


@dataclass(frozen=True, slots=True)
class TargetFeatures:
    """What training reads of a forward pass of the target."""

    taps: Tensor  # [B, L, taps * d]: g, the residual streams entering the tapped layers, side by side
    last_hidden: Tensor  # [B, L, d]: the input of lm_head


class Target:
    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any = None,
        name: str = "",
        revision: str | None = None,
    ):
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name or model.config.name_or_path
        self.revision = revision
        self.folder: Path | None = None  # where it was loaded from
        self.format: str | None = None  # of a quantized one
        self.layers = decoder_layers(model)
        self._taps: dict[int, Tensor] = {}
        self._hooks: list[Any] = []
        self.aux_layer_ids: tuple[int, ...] = ()

    @cached_property
    def config(self) -> Any:
        return self.model.config.get_text_config()

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def context(self) -> int:
        return getattr(self.config, "max_position_embeddings", None) or NO_LIMIT

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def embedding(self) -> Tensor:
        return self.model.get_input_embeddings().weight

    @property
    def lm_head(self) -> Tensor:
        return self.model.get_output_embeddings().weight

    @property
    def stop_ids(self) -> frozenset[int]:
        generation = self.model.generation_config
        eos = generation.eos_token_id if generation is not None else None
        eos = self.config.eos_token_id if eos is None else eos
        ids = [eos] if isinstance(eos, int) else list(eos or [])
        return frozenset(ids)

    def tap(self, aux_layer_ids: Sequence[int]) -> None:
        """From now on `forward` also delivers the residual stream entering these layers, in this
        order.
        """
        check_aux_layer_ids(aux_layer_ids, len(self.layers))
        for hook in self._hooks:
            hook.remove()
        self.aux_layer_ids = tuple(aux_layer_ids)
        self._hooks = [
            self.layers[i].register_forward_pre_hook(self._keep(i), with_kwargs=True)
            for i in set(aux_layer_ids)
        ]

    def new_cache(self) -> RollbackCache:
        return RollbackCache(len(self.layers))

    @torch.inference_mode()
    def forward(
        self, ids: Tensor, cache: RollbackCache | None = None, keep: int = 0
    ) -> TargetOutput:
        """ids [rows] continue what the cache holds; logits of the last `keep` rows (0: of all)."""
        out = self.model(
            input_ids=ids[None],
            past_key_values=cache,
            use_cache=cache is not None,
            logits_to_keep=keep,
        )
        taps = [self._taps[i][0] for i in self.aux_layer_ids]
        self._taps.clear()
        hidden = torch.cat(taps, -1) if taps else out.logits.new_empty(len(ids), 0)
        return TargetOutput(out.logits[0], hidden)

    @torch.no_grad()
    def features(self, ids: Tensor, **more: Any) -> TargetFeatures:
        """Run ids [B, L] without a KV cache and without lm_head: training computes logits itself.

        Documents padded on the right need no mask, because attention is causal.
        """
        last = self.model.get_decoder()(input_ids=ids, use_cache=False, **more).last_hidden_state
        taps = torch.cat([self._taps[i] for i in self.aux_layer_ids], -1)
        self._taps.clear()
        return TargetFeatures(taps, last)

    def _keep(self, layer: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._taps[layer] = args[0] if args else kwargs["hidden_states"]  # [1, rows, d]

        return hook

    def require_rollback(self) -> None:
        """Refuses a target with a state that a rollback does not undo, as recurrent layers have:
        tried, not guessed.
        """
        ids = torch.arange(8, device=self.device) % self.vocab_size
        try:
            cache = self.new_cache()
            self.forward(ids[:4], cache)
            self.forward(ids[:3], cache)  # a block that is rejected
            cache.rollback(4)
            after, fresh = (
                self.forward(ids[4:], cache).logits.float(),
                self.forward(ids).logits[4:].float(),
            )
            undone = cache.length == 8 and torch.allclose(
                after, fresh, rtol=0.1, atol=0.05 * float(fresh.abs().max())
            )
        except (AssertionError, AttributeError, TypeError, ValueError, RuntimeError):
            undone = False
        if not undone:
            raise UserError(
                f"target {self.name!r} cannot be rolled back after a rejected draft (it is no plain attention model):"
                " use a target whose layers are all attention layers"
            )


def load_target(
    folder: Path, dtype: torch.dtype, device: str, name: str = "", revision: str | None = None
) -> Target:
    """Reads config, safetensors and tokenizer from a local folder; never touches the network."""
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise UserError(
            f"no target in {folder}: config.json is missing. Give a folder that `peagle pull` made"
        )
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    quantization = quantization_of(folder)
    try:
        load: Any = AutoModelForCausalLM.from_pretrained if quantization is None else load_quantized
        model, info = load(
            folder,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
        tokenizer = (
            AutoTokenizer.from_pretrained(folder, local_files_only=True)
            if has_tokenizer(folder)
            else None
        )
    except UserError:
        raise
    except Exception as error:  # transformers raises whatever the file brings up
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"cannot load the target in {folder}: {reason}") from error
    if missing := sorted(info["missing_keys"]):
        raise UserError(
            f"the target in {folder} lacks {len(missing)} tensors, the first is {missing[0]}: get it again"
        )
    target = Target(model.to(device), tokenizer, name or str(folder), revision)
    target.folder = folder.resolve()
    attach(model, info.get("codes", {}), device)
    target.format = None if quantization is None else format_name(quantization)
    target.require_rollback()
    return target


def load_quantized(
    folder: Path, dtype: torch.dtype, **how: Any
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A model in `dtype` whose weights were multiplied out, and the codes of those that may be read
    in 8 bits.
    """
    format_name(quantization_of(folder) or {})  # a layout that we do not read
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    del config.quantization_config
    with torch.device("meta"):
        kind: Any = type(AutoModelForCausalLM.from_config(config))
    tensors, codes = read(folder, dtype)
    model, info = kind.from_pretrained(None, config=config, state_dict=tensors, dtype=dtype, **how)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model, info | {"codes": codes}


def has_tokenizer(folder: Path) -> bool:
    return any(
        (folder / name).is_file()
        for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
    )


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The list of decoder layers, whatever the architecture calls it."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UserError(f"cannot find the {count} decoder layers of {type(model).__name__}")


def default_aux_layer_ids(layers: int) -> tuple[int, int, int]:
    """vLLM's default: what a checkpoint without ids means."""
    return (2, layers // 2, layers - 3)


def check_aux_layer_ids(ids: Sequence[int], layers: int) -> None:
    if bad := [i for i in ids if not 0 <= i < layers]:
        raise UserError(
            f"aux layer ids {bad} do not exist: the target has layers 0 to {layers - 1},"
            " and an id names the residual stream entering that layer"
        )
