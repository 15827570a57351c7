"""The target of a capture, which never runs, and the features of its documents."""

import json
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from peagle.catalog import find_pair
from peagle.errors import UserError
from peagle.target import Target
from peagle.train.data.pack import Batch
from peagle.train.features.features import FeatureSource
from peagle.train.features.shards import (
    HEAD_FILE,
    Shards,
    TargetRecord,
    read_capture_record,
    read_shard,
    read_target_record,
)
from peagle.train.features.teacher import PackFeatures, TopKLogits

STORED_BLOCKS = 4  # of the target's last decoder layers, for `init = target`


class StoredTarget(Target):
    """The parts of a target that training reads: head, config, last blocks. It runs no tokens."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: str) -> None:
        self.shards = Shards(folder)
        record = read_target_record(folder)
        self.name = record.name
        self.revision = record.revision
        self.mask_token_id = record.mask_token_id
        self.tokenizer = self.folder = None
        capture = read_capture_record(folder)
        self.aux_layer_ids = tuple(capture.aux_layer_ids)
        self.requested_context = capture.context
        self._config = AutoConfig.for_model(**record.config)
        if capture.context is None and self.rope_context is not None:
            raise UserError(
                f"the features in {folder} have RoPE of several lengths, as earlier versions"
                " computed it: capture them again"
            )
        self._stop_ids = frozenset(record.stop_ids)
        model: Any = StoredModel(read_shard(folder / HEAD_FILE).tensors, dtype, device)
        self.model: Any = model
        missing = record.layers - len(model.last_blocks)
        self.layers = nn.ModuleList([*(nn.Module() for _ in range(missing)), *model.last_blocks])

    @property
    def config(self) -> Any:
        return self._config

    @property
    def device(self) -> torch.device:
        return self.model.embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.embed.weight.dtype

    @property
    def stop_ids(self) -> frozenset[int]:
        return self._stop_ids

    def tap(self, *args: Any) -> NoReturn:
        raise UserError(
            f"{self.shards.folder} holds the features of target {self.name!r}, not the target:"
            " load the target itself"
        )

    def forward(self, *args: Any, **options: Any) -> NoReturn:
        self.tap()

    def features(self, *args: Any, **options: Any) -> NoReturn:
        self.tap()


class StoredModel(nn.Module):
    """The stored part of the target's model; its blocks stay on the CPU, outside its parameters."""

    def __init__(self, tensors: dict[str, Tensor], dtype: torch.dtype, device: str) -> None:
        super().__init__()
        embedding = tensors.pop("embed_tokens.weight").to(device, dtype)
        self.embed = build_module({"weight": embedding})
        lm_head = tensors.pop("lm_head.weight", None)
        self.output = (
            self.embed if lm_head is None else build_module({"weight": lm_head.to(device, dtype)})
        )
        decoder: Any = build_module(tensors)
        self._decoder = [
            decoder
        ]  # In a list, so that its weights are no parameters of this module.
        blocks = dict(decoder.layers.named_children())
        self.last_blocks = [blocks[i] for i in sorted(blocks, key=int)]

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.output

    def get_decoder(self) -> nn.Module:
        return self._decoder[0]


class StoredFeatures:
    """The features of a capture, for any of its documents; the teacher holds `TopKLogits`."""

    softcap = 0.0  # Captured logits are soft-capped already.

    def __init__(self, target: StoredTarget, target_ids: Tensor | None) -> None:
        """`target_ids` is the draft vocabulary; None is the whole vocabulary."""
        self.target = target
        self.shards = target.shards
        self.aux_layer_ids = target.aux_layer_ids
        # [vocabulary] the draft id of each target id; -1 is outside
        self.draft_ids = torch.arange(target.vocab_size, dtype=torch.int32, device=target.device)
        if target_ids is not None:
            self.draft_ids.fill_(-1)
            own = target_ids.to(target.device)
            self.draft_ids[own] = torch.arange(len(own), dtype=torch.int32, device=target.device)

    def uncached(self) -> FeatureSource:
        return self

    def __call__(self, batch: Batch) -> PackFeatures:
        assert batch.document_indices is not None
        documents = zip(batch.document_indices.tolist(), batch.lengths, strict=True)
        rows = [self.shards.rows(index, length) for index, length in documents]
        size = len(batch.ids)
        taps = self._concatenate([part.taps for part in rows], size)
        logits = self._concatenate([part.logits for part in rows], size)
        tokens = self._concatenate([part.tokens for part in rows], size)
        teacher = TopKLogits(logits, self.draft_ids[tokens])
        return PackFeatures(taps.to(self.target.dtype), teacher)

    def _concatenate(self, parts: list[Tensor], size: int) -> Tensor:
        """[size, ...] on the device, padded with zeros."""
        device = self.target.device
        out = torch.empty(
            size, *parts[0].shape[1:], dtype=parts[0].dtype, pin_memory=device.type == "cuda"
        )
        total = sum(len(part) for part in parts)
        torch.cat(parts, out=out[:total])
        out[total:] = 0
        return out.to(device, non_blocking=True)


def head_tensors(target: Target) -> dict[str, Tensor]:
    """The tensors of head.safetensors.

    They are the embeddings, lm_head unless it is the same table, and what a drafter may be
    initialized with (drafter_init.init_from_target).
    """
    tensors = {"embed_tokens.weight": target.embedding}
    if target.lm_head.data_ptr() != target.embedding.data_ptr():
        tensors["lm_head.weight"] = target.lm_head
    norm: Any = getattr(target.model.get_decoder(), "norm", None)
    if isinstance(getattr(norm, "weight", None), Tensor):
        tensors["norm.weight"] = norm.weight
    count = len(target.layers)
    for i in range(max(0, count - STORED_BLOCKS), count):
        weights = target.layers[i].named_parameters()
        tensors |= {
            f"layers.{i}.{name}": weight for name, weight in weights if "expert" not in name
        }
    return tensors


def describe_target(target: Target) -> TargetRecord:
    return TargetRecord(
        name=target.name or "",
        revision=target.revision,
        stop_ids=sorted(target.stop_ids),
        mask_token_id=pair_mask_token_id(str(target.name)),
        layers=len(target.layers),
        blocks=min(STORED_BLOCKS, len(target.layers)),
        config=json.loads(target.config.to_json_string(use_diff=False)),
    )


def pair_mask_token_id(pair: str) -> int | None:
    """The mask token id of a pair in the catalog; None if there is no such pair."""
    try:
        source = find_pair(pair).drafters.get("p-eagle")
    except UserError:
        return None
    return source.mask_token_id if source else None


def build_module(tensors: dict[str, Tensor]) -> nn.Module:
    """Nested modules whose named_parameters() are these tensors."""
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        node = root
        for part in path:
            if part not in node._modules:
                node.add_module(part, nn.Module())
            node = node.get_submodule(part)
        node.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
    return root
