"""A capture, read: training without the target. `capture.py` writes it.

capture.json              what it was made with: target, aux layers, top-k, the data's digest, how many shards
target.json               the target's name, revision, stop ids and config
head.safetensors          its embeddings, lm_head (where it is another table), final norm and last blocks
shard-00000.safetensors   whole documents: ids int32 [T], answer bool [T], starts int64 [documents + 1],
                          g bfloat16 [T, taps * d], logits float16 [T, k] (log-probabilities of the likeliest
                          tokens, the likeliest first) and tokens int32 [T, k], their ids in the whole vocabulary;
                          metadata: {"first": number of the first document, "keys": [...]}
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig

from peagle.errors import UserError
from peagle.target import Target
from peagle.train.data.documents import Documents, join

CAPTURE, TARGET, HEAD = "capture.json", "target.json", "head.safetensors"
VERSION = 1
BLOCKS = 4  # of the target's last ones, for `init=target`
AGAIN = "run `peagle capture` again, it goes on where it was"


class StoredTarget(Target):
    """What training reads of a target: its head, its config, and its last blocks to begin as. It runs no tokens."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: str) -> None:
        self.shards, told = Shards(folder), read_told(folder / TARGET)
        self.name, self.revision, self.mask_token_id = (
            told["name"],
            told["revision"],
            told["mask_token_id"],
        )
        self.tokenizer = self.folder = None
        self.aux_layer_ids = tuple(read_told(folder / CAPTURE)["aux_layer_ids"])
        self._config = AutoConfig.for_model(**told["config"])
        self._stop_ids = frozenset(told["stop_ids"])
        head: Any = Head(read_shard(folder / HEAD)[0], dtype, device)
        self.model = head
        last = head.last_blocks
        self.layers = nn.ModuleList(
            [*(nn.Module() for _ in range(told["layers"] - len(last))), *last]
        )

    @property
    def config(self) -> Any:
        return self._config

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def stop_ids(self) -> frozenset[int]:
        return self._stop_ids

    def tap(self, *args: Any) -> None:
        raise UserError(
            f"{self.shards.folder} holds what target {self.name!r} computed, not the target: load that one"
        )

    def forward(self, *args: Any, **more: Any) -> Any:
        self.tap()

    def features(self, *args: Any, **more: Any) -> Any:
        self.tap()


class Head(nn.Module):
    """The part of the target's model that was stored; the blocks stay on the CPU, outside its parameters."""

    def __init__(self, tensors: dict[str, Tensor], dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.embed = module_of({"weight": tensors.pop("embed_tokens.weight").to(device, dtype)})
        output = tensors.pop("lm_head.weight", None)
        self.output = (
            self.embed if output is None else module_of({"weight": output.to(device, dtype)})
        )
        rest: Any = module_of(tensors)
        self._decoder = [rest]  # in a list: no parameters of this module
        blocks = dict(rest.layers.named_children())
        self.last_blocks = [blocks[i] for i in sorted(blocks, key=int)]

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.output

    def get_decoder(self) -> nn.Module:
        return self._decoder[0]


def head_of(target: Target) -> dict[str, Tensor]:
    """Embeddings, lm_head unless it is the same table, and what a drafter may begin as (setup.begin_as_target)."""
    tensors = {"embed_tokens.weight": target.embedding}
    if target.lm_head.data_ptr() != target.embedding.data_ptr():
        tensors["lm_head.weight"] = target.lm_head
    norm: Any = getattr(target.model.get_decoder(), "norm", None)
    if isinstance(getattr(norm, "weight", None), Tensor):
        tensors["norm.weight"] = norm.weight
    count = len(target.layers)
    for i in range(max(0, count - BLOCKS), count):
        own = target.layers[i].named_parameters()
        tensors |= {f"layers.{i}.{name}": weight for name, weight in own if "expert" not in name}
    return tensors


def about_target(target: Target, mask_token_id: int | None) -> dict[str, Any]:
    return {
        "name": target.name,
        "revision": target.revision,
        "stop_ids": sorted(target.stop_ids),
        "mask_token_id": mask_token_id,  # the pair's
        "layers": len(target.layers),
        "blocks": min(BLOCKS, len(target.layers)),
        "config": json.loads(target.config.to_json_string(use_diff=False)),
    }


def module_of(tensors: dict[str, Tensor]) -> nn.Module:
    """Nested modules whose named_parameters() are these."""
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


class Shards:
    """All shards of a finished capture, memory-mapped: a document's rows are read when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, count = folder, read_told(folder / CAPTURE)["shards"]
        files = [folder / shard_name(i) for i in range(count)]
        if there := [file for file in files if not file.is_file()]:
            raise UserError(
                f"the capture in {folder} lacks {len(there)} of its {count} shards: {AGAIN}"
            )
        read = [read_shard(file) for file in files]
        self.tensors = [tensors for tensors, _ in read]
        self.keys = [about["keys"] for _, about in read]
        self.first = np.array([about["first"] for _, about in read])  # [shards]

    def documents(self, max_length: int) -> Documents:
        """Longer ones are cut: attention is causal, so what was captured of their beginning holds."""
        parts, numbers = [], []
        for first, keys, tensors in zip(self.first.tolist(), self.keys, self.tensors, strict=True):
            ids, answer, starts = (tensors[name].numpy() for name in ("ids", "answer", "starts"))
            for i, key in enumerate(keys):
                at = slice(starts[i], min(starts[i] + max_length, starts[i + 1]))
                if answer[at][2:].any():
                    parts.append((ids[at], answer[at], key))
                    numbers.append(first + i)
        return join(parts, 0, np.array(numbers, dtype=np.int64))

    def rows(self, number: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """g, logits and tokens of a document's first tokens: views of the files."""
        shard = int(np.searchsorted(self.first, number, side="right")) - 1
        tensors = self.tensors[shard]
        start = int(tensors["starts"][number - self.first[shard]])
        at = slice(start, start + length)
        return tensors["g"][at], tensors["logits"][at], tensors["tokens"][at]


def shard_name(i: int) -> str:
    return f"shard-{i:05d}.safetensors"


def read_shard(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, not yet read from the disk, metadata)"""
    try:
        with safe_open(file, framework="pt") as handle:
            about = json.loads((handle.metadata() or {}).get("about", "{}"))
            return {name: handle.get_tensor(name) for name in handle.keys()}, about  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({error}): remove it and {AGAIN}") from error


def read_told(path: Path) -> dict[str, Any]:
    try:
        told = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): {AGAIN}") from error
    if path.name == CAPTURE and told.get("version") != VERSION:
        raise UserError(
            f"{path.parent} has format version {told.get('version')}, we read {VERSION}: capture again"
        )
    return told
