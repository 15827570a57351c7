"""The target: any causal LM of transformers, with taps on its residual stream.

Tap `l` is the un-normed residual stream *entering* decoder layer `l`: `hidden_states[l]` of
transformers, aux layer id `l` of vLLM. Hooks capture the taps in the forward pass that computes the
logits: there is no second pass, and no other layer is stored.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from peagle.errors import UserError
from peagle.kernels.stored_matrix import StoredMatrix, Table, dense, table_rows
from peagle.paths import STORED_FILE
from peagle.target.cache import RollbackCache
from peagle.target.experts.mxfp4_read import MXFP4_EXPERTS, has_mxfp4, load_mxfp4
from peagle.target.gguf.config_folder import config_folder
from peagle.target.gguf.header import GGUFHeader, read_header
from peagle.target.gguf.model import load_model, stored_format
from peagle.target.gguf.pre_tokenizer import warn_of_splitting
from peagle.target.loading_error import loading_reason
from peagle.target.meta_initialization import no_meta_initialization
from peagle.target.precision import SpeedChoice
from peagle.target.quantized.codes import QuantizedWeight
from peagle.target.quantized.model import load_quantized
from peagle.target.quantized.read import attach_quantized, format_name, read_quantization
from peagle.target.residual_taps import ResidualTaps
from peagle.target.rope import config_depends_on_length, freeze_rope, shortest_context
from peagle.target.tokenizer import load_tokenizer

UNLIMITED_CONTEXT = 1 << 20  # for a target whose config has no limit
SHARED_TYPES = (Tensor, QuantizedWeight, StoredMatrix)  # what copies of a model share


@dataclass(slots=True)
class TargetOutput:
    logits: Tensor  # [rows with logits, vocabulary]
    hidden: Tensor  # [rows, taps * d] g, the taps side by side; [rows, 0] without taps


@dataclass(frozen=True, slots=True)
class TargetFeatures:
    """What training reads of a forward pass of the target."""

    taps: (
        Tensor  # [B, L, taps * d]: g, the residual streams entering the tapped layers, side by side
    )
    last_hidden: Tensor  # [B, L, d]: the input of lm_head


class Target:
    requested_context: int | None = None
    # The formats of a GGUF file whose weights stay as stored, such as Q4_K/Q6_K.
    stored_format: str | None = None
    gguf: GGUFHeader | None = None  # the file that the weights as stored are mapped from

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any = None,
        name: str = "",
        revision: str | None = None,
        context: int | None = None,
    ):
        """`context`: the most tokens of a prompt and its answer; None: what the model supports.

        RoPE that depends on the length of a pass is frozen for it (rope.py).
        """
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name or model.config.name_or_path
        self.revision = revision
        self.folder: Path | None = None  # from which it was loaded
        self.format: str | None = None  # fp8, int8, int4, mixed or mxfp4 experts
        self.speed_choice: SpeedChoice | None = None  # why it has this dtype, if that was measured
        self.layers = decoder_layers(model)
        self._taps = ResidualTaps(self.layers, ())
        self.aux_layer_ids: tuple[int, ...] = ()
        if context is not None and context < 2:
            raise UserError(f"`context` is {context}: use 2 or more")
        self.requested_context = context
        freeze_rope(model, self.context)

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
    def max_context(self) -> int:
        """What the model supports."""
        return getattr(self.config, "max_position_embeddings", None) or UNLIMITED_CONTEXT

    @property
    def context(self) -> int:
        return min(self.requested_context or self.max_context, self.max_context)

    @property
    def shortest_context(self) -> int:
        """The shortest context with this target's RoPE: a shorter one has other frequencies."""
        return shortest_context(self.config, self.context)

    @property
    def rope_context(self) -> int | None:
        """The context for which RoPE is frozen; None: RoPE is the same for every context."""
        return self.context if config_depends_on_length(self.config) else None

    def fit_context(self, tokens: int) -> int:
        """The smallest context for `tokens` tokens that an engine of this target may have."""
        return min(self.context, max(tokens, self.shortest_context))

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def embedding_table(self) -> Table:
        """[vocabulary, d] as it is in memory: weights of a GGUF file as stored."""
        return self.model.get_input_embeddings().weight

    @property
    def head_table(self) -> Table:
        """[vocabulary, d] as it is in memory: weights of a GGUF file as stored."""
        return self.model.get_output_embeddings().weight

    def embed(self, token: int) -> Tensor:
        """The embedding [d] of one token."""
        return table_rows(self.embedding_table, torch.tensor(token, device=self.device), self.dtype)

    @property
    def embedding(self) -> Tensor:
        """The embedding in the target's dtype. Weights as stored are widened in every call."""
        return dense(self.embedding_table, self.dtype)

    @property
    def lm_head(self) -> Tensor:
        """The output matrix in the target's dtype; see `embedding`."""
        return dense(self.head_table, self.dtype)

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that end an answer."""
        generation = self.model.generation_config
        eos = generation.eos_token_id if generation is not None else None
        eos = self.config.eos_token_id if eos is None else eos
        ids = [eos] if isinstance(eos, int) else list(eos or [])
        return frozenset(ids)

    def tap(self, aux_layer_ids: Sequence[int]) -> None:
        """Make `forward` also return the residual stream entering these layers, in this order."""
        check_aux_layer_ids(aux_layer_ids, len(self.layers))
        self._taps.remove()
        self._taps = ResidualTaps(self.layers, aux_layer_ids)
        self.aux_layer_ids = self._taps.ids

    def private_model(self) -> PreTrainedModel:
        """A copy of the model that shares all tensors, with a config and modules of its own.

        Whoever changes the attention or adds hooks does so on a copy: other users of the target,
        in other threads too, do not notice. The copy has no taps.
        """
        memo = shared_tensors(self.model)
        private: PreTrainedModel
        private, handles = copy.deepcopy((self.model, self._taps.handles), memo)
        for handle in handles:
            handle.remove()
        for module in private.modules():
            # Only the target's own modules give up their codes when an engine merges them.
            vars(module).pop("quantized_weight", None)
        return private

    def release_pages(self) -> None:
        """Give back the memory of a GGUF file whose weights an engine has packed."""
        if self.gguf is not None:
            self.gguf.release_pages()

    def new_cache(self) -> RollbackCache:
        return RollbackCache(len(self.layers))

    @torch.inference_mode()
    def forward(
        self, ids: Tensor, cache: RollbackCache | None = None, keep: int = 0
    ) -> TargetOutput:
        """Run ids [rows] after the tokens in the cache; logits of the last `keep` rows (0: all)."""
        out = self.model(
            input_ids=ids[None],
            past_key_values=cache,
            use_cache=cache is not None,
            logits_to_keep=keep,
        )
        taps = self._taps.take()
        hidden = torch.cat(taps, -1)[0] if taps else out.logits.new_empty(len(ids), 0)
        return TargetOutput(out.logits[0], hidden)

    @torch.no_grad()
    def features(self, ids: Tensor, **more: Any) -> TargetFeatures:
        """Run ids [B, L] without a KV cache and without lm_head: training computes logits itself.

        Documents padded on the right need no mask, because attention is causal.
        """
        last = self.model.get_decoder()(input_ids=ids, use_cache=False, **more).last_hidden_state
        return TargetFeatures(torch.cat(self._taps.take(), -1), last)

    def require_rollback(self) -> None:
        """Raise if a rollback does not restore the target's state, as with recurrent layers.

        A short run decides: a rejected block, a rollback, and a comparison with a fresh pass.
        """
        ids = torch.arange(8, device=self.device) % self.vocab_size
        try:
            cache = self.new_cache()
            self.forward(ids[:4], cache)
            self.forward(ids[:3], cache)  # a rejected block
            cache.rollback(4)
            continued = self.forward(ids[4:], cache).logits.float()
            fresh = self.forward(ids).logits[4:].float()
            tolerance = 0.05 * float(fresh.abs().max())
            equal = torch.allclose(continued, fresh, rtol=0.1, atol=tolerance)
            restored = equal and cache.length == 8
        except (AssertionError, AttributeError, TypeError, ValueError, RuntimeError):
            restored = False
        if not restored:
            raise UserError(
                f"target {self.name!r} cannot be rolled back after a rejected draft:"
                " use a target whose layers are all attention layers"
            )


def load_target(
    folder: Path,
    dtype: torch.dtype,
    device: str,
    name: str = "",
    revision: str | None = None,
    context: int | None = None,
    stored: bool = False,
) -> Target:
    """Load config, weights and tokenizer from a local folder or a GGUF file, without a network.

    `stored`: keep the weights of the GGUF file, or of the one in the folder (gguf/choice.py), as
    they are stored; `dtype` is then that of the activations. Otherwise a GGUF file is dequantized.
    """
    folder = Path(folder)
    file = folder / STORED_FILE if stored and folder.is_dir() else folder
    if not file.is_file() and not (folder / "config.json").is_file():
        raise UserError(
            f"no target in {folder}: config.json is missing. Give a folder from `peagle pull`"
        )
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        if file.is_file():
            target = load_gguf(file, folder, dtype, device, context, stored)
        else:
            target = load_folder(folder, dtype, device, context)
    except UserError:
        raise
    except Exception as error:  # transformers raises exceptions of any type
        raise UserError(f"cannot load the target in {folder}: {loading_reason(error)}") from error
    target.name = name or str(folder)
    target.revision = revision
    target.require_rollback()
    return target


def load_folder(folder: Path, dtype: torch.dtype, device: str, context: int | None) -> Target:
    """A target from config.json and safetensors."""
    if has_mxfp4(folder):
        return load_with_experts(folder, dtype, device, context)
    quantization = read_quantization(folder)
    target_format: str | None = None
    weights: dict[str, QuantizedWeight] = {}
    options: dict[str, Any] = {
        "dtype": dtype,
        "local_files_only": True,
        "use_safetensors": True,
        "output_loading_info": True,
    }
    if quantization is None:
        auto_class: Any = AutoModelForCausalLM
        with no_meta_initialization():
            model, info = auto_class.from_pretrained(folder, trust_remote_code=False, **options)
    else:
        target_format = format_name(quantization)  # raises for unsupported layouts
        model, info, weights = load_quantized(folder, options)
    tokenizer = load_tokenizer(folder)
    require_complete(folder, sorted(info["missing_keys"]))
    target = Target(model.to(device), tokenizer, context=context)
    target.folder = folder.resolve()
    attach_quantized(model, weights, device)
    target.format = target_format
    return target


def load_with_experts(folder: Path, dtype: torch.dtype, device: str, context: int | None) -> Target:
    """A target whose experts stay in MXFP4, as GPT-OSS is published."""
    model: Any = load_mxfp4(folder, dtype, device)
    target = Target(model.to(device), load_tokenizer(folder), context=context)
    target.folder = folder.resolve()
    target.format = MXFP4_EXPERTS
    return target


def load_gguf(
    file: Path,
    folder: Path,
    dtype: torch.dtype,
    device: str,
    context: int | None,
    stored: bool,
) -> Target:
    """A target from a GGUF file; config and tokenizer from its folder, or from the file itself."""
    header = read_header(file)
    if folder == file:
        folder = config_folder(header)
        warn_of_splitting(header)
    model: Any = load_model(header, folder, dtype, keep_stored=stored)
    target = Target(model.to(device), load_tokenizer(folder), context=context)
    target.folder = folder.resolve()
    target.stored_format = stored_format(model)
    target.gguf = header if stored else None
    return target


def require_complete(folder: Path, missing: list[str]) -> None:
    if missing:
        raise UserError(
            f"the target in {folder} lacks {len(missing)} tensors, the first is {missing[0]}:"
            " download or copy it again"
        )


def shared_tensors(model: nn.Module) -> dict[int, Any]:
    """The memo with which a deep copy of the model has the same tensors, not copies of them."""
    shared: list[Any] = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        shared += [x for x in vars(module).values() if isinstance(x, SHARED_TYPES)]
    return {id(x): x for x in shared}


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The list of decoder layers, independent of its name in the architecture."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.get_decoder().modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UserError(
        f"cannot find the {count} decoder layers of {type(model).__name__}: use another target"
    )


def default_aux_layer_ids(layers: int) -> tuple[int, int, int]:
    """vLLM's default, which applies to a checkpoint without ids."""
    return (2, layers // 2, layers - 3)


def check_aux_layer_ids(ids: Sequence[int], layers: int) -> None:
    if invalid := [i for i in ids if not 0 <= i < layers]:
        raise UserError(
            f"aux layer ids {invalid} do not exist: the target has layers 0 to {layers - 1},"
            " and an id means the residual stream entering that layer"
        )
