"""GGUFHeader: what a GGUF file says about itself before the data of its tensors.

gguf.GGUFReader reads the same, but builds an array for every token of the vocabulary: 2.4 s for
49,152 tokens. Here the lists of the vocabulary are skipped.

    "GGUF" | version u32 | tensors u64 | entries u64 | entries | tensor infos | padding | data
    entry:        key, type u32, value           a list: type u32, length u64, values
    tensor info:  name, dims u32, dims u64 (innermost first), format u32, offset u64 in the data
"""

import hashlib
import math
import mmap
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from torch import Tensor

from peagle.errors import UserError

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # version 1 has lengths of 32 bits, and its tensor formats are gone
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
SCALARS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}
COPY_AGAIN = "copy or download it again"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    name: str
    format: str  # F32, Q4_1, ...
    shape: tuple[int, ...]  # as in PyTorch: the outermost dimension first
    start: int  # of its data in the file
    size: int  # bytes


@dataclass(frozen=True)
class GGUFHeader:
    path: Path
    metadata: dict[str, Any]  # without the lists
    tensors: dict[str, TensorInfo]
    digest: str  # sha256 of the header: of everything but the data of the tensors

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    @cached_property
    def mapping(self) -> mmap.mmap:
        """The file in memory: bytes are read when they are used."""
        with self.path.open("rb") as file:
            # A private copy in name only, because nobody writes: PyTorch wants writable memory.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    @cached_property
    def data(self) -> Tensor:
        return torch.frombuffer(self.mapping, dtype=torch.uint8)

    def release_pages(self) -> None:
        """Give the memory of the file's bytes back; those that are used again are read again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.mapping.madvise(mmap.MADV_DONTNEED)

    def bytes_of(self, info: TensorInfo) -> Tensor:
        """The bytes of a tensor, [outermost dimension, bytes of a row] uint8."""
        return self.data[info.start : info.start + info.size].view(info.shape[0], -1)


class Cursor:
    """Reads the values of a header one after the other."""

    def __init__(self, content: memoryview) -> None:
        self.content = content
        self.position = 0

    def read(self, layout: str) -> Any:
        (value,) = struct.unpack_from(layout, self.content, self.position)
        self.position += struct.calcsize(layout)
        return value

    def text(self) -> str:
        start = self.skip(self.read("<Q"))
        return str(self.content[start : self.position], "utf-8", "replace")

    def skip(self, count: int) -> int:
        """Move on by `count` bytes; returns where they begin."""
        start = self.position
        if count > len(self.content) - start:
            raise struct.error("a length exceeds the file")
        self.position += count
        return start

    def value(self) -> Any:
        """The value of an entry; None for a list."""
        kind = GGUFValueType(self.read("<I"))
        if kind is GGUFValueType.STRING:
            return self.text()
        if kind is not GGUFValueType.ARRAY:
            return self.read(SCALARS[kind])
        item = GGUFValueType(self.read("<I"))
        count = self.read("<Q")
        if item is GGUFValueType.STRING:
            for _ in range(count):
                self.skip(self.read("<Q"))
        else:
            self.skip(count * struct.calcsize(SCALARS[item]))
        return None


def read_header(path: Path) -> GGUFHeader:
    """Read the header of a GGUF file, and check that the data of all tensors lies in the file."""
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise UserError(f"{path} is not a GGUF file: give a .gguf file, or a folder")
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return parse_header(path, memoryview(content))
    except UserError:  # a ValueError too
        raise
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except (struct.error, ValueError, KeyError, OverflowError) as error:
        raise UserError(f"{path} is damaged or truncated ({error}): {COPY_AGAIN}") from error


def parse_header(path: Path, content: memoryview) -> GGUFHeader:
    cursor = Cursor(content)
    cursor.skip(len(MAGIC))
    version = cursor.read("<I")
    if version not in VERSIONS:
        raise UserError(
            f"{path} has GGUF version {version}, and only {VERSIONS[0]} and {VERSIONS[1]} are"
            " supported (little-endian): convert it again with a current llama.cpp"
        )
    tensor_count = cursor.read("<Q")
    entries = cursor.read("<Q")
    metadata = {}
    for _ in range(entries):
        key = cursor.text()
        value = cursor.value()
        if value is not None:
            metadata[key] = value
    raw_infos = [read_info(cursor) for _ in range(tensor_count)]
    digest = hashlib.sha256(content[: cursor.position]).hexdigest()
    alignment = read_integer(metadata, "general.alignment", DEFAULT_ALIGNMENT, minimum=1)
    data_start = -(-cursor.position // alignment) * alignment
    tensors = {
        name: tensor_info(path, name, number, shape, data_start + offset)
        for name, number, shape, offset in raw_infos
    }
    end = max((info.start + info.size for info in tensors.values()), default=0)
    if end > len(content):
        raise UserError(
            f"{path} is truncated: it has {len(content):,} bytes, and its tensors end at {end:,}:"
            f" {COPY_AGAIN}"
        )
    check_parts(path, metadata)
    return GGUFHeader(path, metadata, tensors, digest)


def read_info(cursor: Cursor) -> tuple[str, int, tuple[int, ...], int]:
    """Name, number of the format, shape and offset of a tensor."""
    name = cursor.text()
    dims = cursor.read("<I")
    if not 1 <= dims <= MAX_DIMS:
        raise ValueError(f"tensor {name} has {dims} dimensions")
    innermost_first = [cursor.read("<Q") for _ in range(dims)]
    return name, cursor.read("<I"), tuple(reversed(innermost_first)), cursor.read("<Q")


def tensor_info(
    path: Path, name: str, number: int, shape: tuple[int, ...], start: int
) -> TensorInfo:
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise UserError(
            f"{path}: tensor {name} has format {number}, which is unknown here: update the gguf"
            " package, or quantize the model to Q4_K_M or Q8_0"
        ) from None
    inputs, size = GGML_QUANT_SIZES[kind]
    if not math.prod(shape) or shape[-1] % inputs:
        raise ValueError(f"tensor {name} of format {kind.name} has shape {list(shape)}")
    return TensorInfo(name, kind.name, shape, start, math.prod(shape) // inputs * size)


def read_integer(metadata: dict[str, Any], key: str, default: int, minimum: int) -> int:
    value = metadata.get(key, default)
    if type(value) is not int or value < minimum:
        raise ValueError(f"{key} is {value!r}")
    return value


def check_parts(path: Path, metadata: dict[str, Any]) -> None:
    parts = read_integer(metadata, "split.count", 1, minimum=0)
    if parts > 1:
        raise UserError(
            f"{path} is one of {parts} parts of a model: merge them with"
            " `llama-gguf-split --merge`, and give the merged file"
        )
