"""The tensors of a GGUF file by their names in transformers.

A matrix in one of BLOCK_FORMATS stays as it is stored. Other formats are dequantized. transformers
knows the names, and what its model needs beyond them: llama.cpp permutes the rows of some queries
and keys, subtracts 1 from some norms, and stacks experts. A permutation of rows is one of rows of
blocks, so it needs no dequantization.
"""

import logging
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import modeling_gguf_pytorch_utils as hf_gguf

from peagle.errors import UserError
from peagle.kernels.stored_matrix import BLOCK_FORMATS, StoredMatrix, Table
from peagle.progress import Progress, silent
from peagle.target.gguf.header import GGUFHeader, TensorInfo

PLAIN_FORMATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
ROPE_FACTORS = "rope_freqs.weight"  # read by model.py
BLOCK_TENSOR = re.compile(r"blk\.(\d+)\.(.+)")
USED_PARTS = ("blk.", "token_embd", "output")  # names of tensors on which answers depend
# Frequencies of RoPE in old files, which are computed. Blocks beyond the last one draft tokens.
UNUSED_KINDS = ("attn_rot_embd.weight", "attn_rot_embd")
log = logging.getLogger(__name__)


class TensorReader:
    def __init__(self, header: GGUFHeader, model: PreTrainedModel, keep_stored: bool) -> None:
        """`model`: on the meta device. `keep_stored`: False dequantizes every tensor."""
        self.header = header
        self.model = model
        self.keep_stored = keep_stored
        processor = hf_gguf.TENSOR_PROCESSORS.get(header.architecture, hf_gguf.TensorProcessor)
        self.processor = processor(config=model.config.to_dict())
        self.names = self._names()
        self.dequantized: dict[str, int] = {}  # format -> bytes, of matrices that could be smaller
        self.ignored: list[str] = []
        self.merged: dict[str, Any] = {"tensors": {}}  # what the processor merges of several ones

    def read(self, progress: Progress = silent) -> Iterator[tuple[str, Table]]:
        """Every tensor that the model has, with its name there; logs what was dequantized."""
        total = sum(info.size for info in self.header.tensors.values())
        done = 0
        yield from self._absent_biases()
        for info in self.header.tensors.values():
            name = self.names.get(info.name)
            matrix = None if name is None else self._stored(info, name)
            if matrix is not None:
                assert name is not None
                yield name, matrix
            else:
                yield from self._processed(info)
            done += info.size
            progress("dequantizing", done, total)
        yield from self.merged["tensors"].items()
        self._report()

    def _absent_biases(self) -> Iterator[tuple[str, Tensor]]:
        """Zeros for biases that no block of a llama file has: transformers wants all or none."""
        kinds = {block_and_kind(name)[1] for name in self.header.tensors}
        for name, own_name in self.names.items():
            block, kind = block_and_kind(name)
            is_bias = block is not None and kind.endswith(".bias")
            if is_bias and self.header.architecture == "llama" and kind not in kinds:
                yield own_name, torch.zeros(self.model.get_parameter(own_name).shape)

    def _names(self) -> dict[str, str]:
        """Name in the file -> name in the model."""
        state = self.model.state_dict()
        # Modules below the whole model are tried only if necessary: that takes seconds.
        whole: Any = SimpleNamespace(
            config=self.model.config, state_dict=lambda: state, named_children=lambda: ()
        )
        names = hf_gguf.get_gguf_hf_weights_map(whole, self.processor)
        if self.header.tensors.keys() - names.keys() - {ROPE_FACTORS}:
            names = hf_gguf.get_gguf_hf_weights_map(self.model, self.processor)
        return names

    def _stored(self, info: TensorInfo, name: str) -> StoredMatrix | None:
        """The tensor as it is stored, if it is the weight of a layer that can hold it so."""
        if not self.keep_stored or info.format not in BLOCK_FORMATS or len(info.shape) != 2:
            return None
        if not can_be_stored(self.model, name):
            return None
        order = self._row_order(info)
        if order is None:
            return None
        blocks = self.header.bytes_of(info)
        if not torch.equal(order, torch.arange(len(order))):
            blocks = blocks[order]
        elif is_embedding(self.model, name):
            # Read for every token, unlike matrices that the engine packs: a file that is
            # overwritten or truncated meanwhile must not change answers, or end the process.
            blocks = blocks.clone()
        return StoredMatrix(info.format, blocks)

    def _row_order(self, info: TensorInfo) -> Tensor | None:
        """The order into which transformers brings the rows; None if it does more than that."""
        rows = info.shape[0]
        probe = np.arange(2 * rows).reshape(rows, 2)
        try:
            result = self.processor.process(
                weights=probe.copy(),
                name=info.name,
                tensor_key_mapping=self.names,
                parsed_parameters={"tensors": {}},
            )
        except (ValueError, IndexError):  # it reshapes rows of the real length
            return None
        moved = result.weights
        if result.name != info.name or moved.shape != probe.shape:
            return None
        order = moved[:, 0] // 2
        return torch.from_numpy(order) if np.array_equal(probe[order], moved) else None

    def _processed(self, info: TensorInfo) -> Iterator[tuple[str, Tensor]]:
        """The tensor in floating point, as transformers needs it."""
        result = self.processor.process(
            weights=dequantize(self.header, info).numpy(),
            name=info.name,
            tensor_key_mapping=self.names,
            parsed_parameters=self.merged,
        )
        if result.name in self.names:
            tensor = torch.from_numpy(np.ascontiguousarray(result.weights))
            yield self.names[result.name], self._narrowed(info, tensor)
        elif result.name is not None:  # without a name, the processor has merged it
            self._ignore(info.name)

    def _ignore(self, name: str) -> None:
        """Note a tensor that the model does not have; an error if results would be wrong."""
        block, kind = block_and_kind(name)
        is_extra = block is not None and block >= self.model.config.num_hidden_layers
        if name.startswith(USED_PARTS) and not is_extra and kind not in UNUSED_KINDS:
            raise UserError(
                f"{self.header.path}: tensor {name} is not part of a"
                f" {self.model.config.model_type} model in transformers, and answers without it"
                " would be wrong: use another file, or the model's safetensors"
            )
        self.ignored.append(name)

    def _narrowed(self, info: TensorInfo, tensor: Tensor) -> Tensor:
        """The tensor in the smallest dtype that holds its values exactly."""
        if info.format in PLAIN_FORMATS:
            return tensor.to(PLAIN_FORMATS[info.format])
        half = tensor.bfloat16()
        exact = half if torch.equal(half.float(), tensor) else tensor
        size = exact.numel() * exact.element_size()
        self.dequantized[info.format] = self.dequantized.get(info.format, 0) + size
        return exact

    def _report(self) -> None:
        file = self.header.path.name
        if self.dequantized and self.keep_stored:
            formats = ", ".join(self.dequantized)
            total = sum(self.dequantized.values()) / 1e6
            log.warning(f"{file}: {formats} tensors are dequantized, to {total:,.0f} MB")
        ignored = [name for name in self.ignored if name != ROPE_FACTORS]
        if ignored:
            log.warning(f"{file}: {len(ignored)} tensors are not used, the first is {ignored[0]}")


def block_and_kind(name: str) -> tuple[int | None, str]:
    """blk.3.attn_q.bias -> 3, attn_q.bias; None for a tensor outside the blocks."""
    match = BLOCK_TENSOR.fullmatch(name)
    return (int(match[1]), match[2]) if match else (None, name)


def can_be_stored(model: nn.Module, name: str) -> bool:
    """Whether `name` is the weight of a plain linear layer or a plain embedding."""
    path, _, kind = name.rpartition(".")
    return kind == "weight" and type(model.get_submodule(path)) in (nn.Linear, nn.Embedding)


def is_embedding(model: nn.Module, name: str) -> bool:
    return isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Embedding)


def dequantize(header: GGUFHeader, info: TensorInfo) -> Tensor:
    """A tensor in float32, in its shape in the file."""
    content = header.bytes_of(info)
    if info.format in PLAIN_FORMATS:
        return content.flatten().clone().view(PLAIN_FORMATS[info.format]).view(info.shape).float()
    if info.format in BLOCK_FORMATS:
        rows = content.reshape(info.size // row_bytes(info), -1)
        return StoredMatrix(info.format, rows).dequantize().view(info.shape)
    try:
        kind = GGMLQuantizationType[info.format]
        wide = quants.dequantize(content.numpy(), kind)
    except NotImplementedError as error:
        raise UserError(
            f"{header.path}: tensor {info.name} has format {info.format}, which cannot be"
            " dequantized here: quantize the model to Q4_K_M or Q8_0"
        ) from error
    return torch.from_numpy(np.ascontiguousarray(wide)).view(info.shape)


def row_bytes(info: TensorInfo) -> int:
    block = BLOCK_FORMATS[info.format]
    return info.shape[-1] // block.inputs * block.size
