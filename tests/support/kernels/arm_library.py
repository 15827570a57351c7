"""The C kernels compiled for ARM and run under qemu, in place of the library of this machine.

`ArmLibrary` looks like a `ctypes.CDLL`: a call copies the tensors and structs behind its pointers
to a file, runs tests/arm/runner.c, and copies them back. So tests of the kernels run on ARM without
changes. An active `AddressBook` knows which tensor or struct an address belongs to.
"""

import ctypes
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from peagle.kernels.cpu.compiler import COMPILER_FLAGS
from peagle.kernels.cpu.library import SOURCE_FOLDER, compile_unit, translation_units

COMPILER = "aarch64-linux-gnu-gcc"
SYMBOLS = "aarch64-linux-gnu-nm"
EMULATOR = "qemu-aarch64"
RUNNER = Path(__file__).parents[2] / "arm" / "runner.c"
NAME_BYTES = 64
VARIANTS = {
    "armv8": "-march=armv8-a",
    "armv8.2-dotprod": "-march=armv8.2-a+dotprod+fp16",
    "armv8.6-bf16": "-march=armv8.6-a+bf16",
}


def missing_programs() -> list[str]:
    return [name for name in (COMPILER, SYMBOLS, EMULATOR) if shutil.which(name) is None]


def build_runner(variant: str, folder: Path, extra_source: str) -> Path:
    """Compile all kernels, `extra_source` and the runner to one static program."""
    (folder / "extra.c").write_text(extra_source)
    flags = [flag for flag in COMPILER_FLAGS if flag not in ("-shared", "-fPIC")]
    command = [COMPILER, *flags, VARIANTS[variant], f"-I{SOURCE_FOLDER}"]
    units = [*translation_units(), [str(folder / "extra.c")]]
    objects = [compile_unit(command, unit, folder) for unit in units]
    listed = subprocess.run(
        [SYMBOLS, "--defined-only", "--extern-only", *objects],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    names = [line.split()[2] for line in listed if line.split()[1:2] == ["T"]]
    table = folder / "table.c"
    table.write_text(
        "".join(f"void {name}(void);\n" for name in names)
        + "const struct { const char *name; void (*function)(void); } kernel_table[] = {"
        + "".join(f'{{"{name}", {name}}},' for name in names)
        + "{0, 0}};\n"
    )
    program = folder / "runner"
    files = [str(RUNNER), str(table), *objects]
    command = [COMPILER, "-O1", "-std=gnu11", "-static", "-pthread", *files, "-lm"]
    subprocess.run([*command, "-o", str(program)], check=True)
    return program


class AddressBook:
    """Keeps all tensors and structs whose address was taken."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.structs: dict[int, ctypes.Structure | ctypes.Array[Any]] = {}
        plain_data_ptr, plain_addressof = Tensor.data_ptr, ctypes.addressof

        def data_ptr(tensor: Tensor) -> int:
            storage = tensor.untyped_storage()
            self.storages[storage.data_ptr()] = storage
            return plain_data_ptr(tensor)

        def addressof(value: Any) -> int:
            address = plain_addressof(value)
            self.structs[address] = value
            return address

        patch.setattr(Tensor, "data_ptr", data_ptr)
        patch.setattr(ctypes, "addressof", addressof)

    def find(self, address: int) -> tuple[int, int]:
        """The address and the size of the tensor or struct which contains this address."""
        for start, value in self.structs.items():
            if start <= address < start + ctypes.sizeof(value):
                return start, ctypes.sizeof(value)
        for start, storage in self.storages.items():
            if start <= address < start + max(1, storage.nbytes()):
                return start, storage.nbytes()
        raise KeyError(f"no tensor or struct at {address:#x}")


def pointer_fields(value: Any, offset: int = 0) -> list[tuple[int, int]]:
    """(offset, address) of the pointers in a struct or an array, nested ones included."""
    found: list[tuple[int, int]] = []
    if isinstance(value, ctypes.Array) and value._type_ is ctypes.c_void_p:
        size = ctypes.sizeof(ctypes.c_void_p)
        return [(offset + i * size, address) for i, address in enumerate(value) if address]
    if isinstance(value, ctypes.Array):
        for i, part in enumerate(value):
            found += pointer_fields(part, offset + i * ctypes.sizeof(part))
        return found
    for name, ctype, *_ in value._fields_:
        at = offset + getattr(type(value), name).offset
        field = getattr(value, name)
        if ctype is ctypes.c_void_p and field:
            found.append((at, field))
        elif isinstance(field, ctypes.Structure | ctypes.Array):
            found += pointer_fields(field, at)
    return found


class CallFile:
    """The buffers of one call, each once, in the order in which they were found."""

    def __init__(self, book: AddressBook) -> None:
        self.book = book
        self.index: dict[int, int] = {}
        self.sizes: list[int] = []
        self.pointers: list[list[tuple[int, int, int]]] = []

    def place(self, address: int) -> tuple[int, int]:
        """The buffer of an address, and the offset in it."""
        start, size = self.book.find(address)
        if start not in self.index:
            self.index[start] = len(self.sizes)
            self.sizes.append(size)
            self.pointers.append([])
            if start in self.book.structs:
                fields = pointer_fields(self.book.structs[start])
                self.pointers[self.index[start]] = [
                    (offset, *self.place(target)) for offset, target in fields
                ]
        return self.index[start], address - start

    def content(self) -> bytes:
        parts = [struct.pack("<q", len(self.sizes))]
        for start, size, pointers in zip(self.index, self.sizes, self.pointers, strict=True):
            parts.append(struct.pack("<qq", size, len(pointers)))
            parts += [struct.pack("<qqq", *pointer) for pointer in pointers]
            parts.append(ctypes.string_at(start, size))
        return b"".join(parts)

    def copy_back(self, content: bytes) -> None:
        for start, size in zip(self.index, self.sizes, strict=True):
            if start not in self.book.structs:  # Structs have pointers of the other process.
                ctypes.memmove(start, content, size)
            content = content[size:]


class ArmFunction:
    def __init__(self, library: "ArmLibrary", name: str) -> None:
        self.library, self.name = library, name
        self.argtypes: list[Any] = []
        self.restype: Any = ctypes.c_int

    def __call__(self, *arguments: Any) -> Any:
        assert len(arguments) == len(self.argtypes), self.name
        calls = CallFile(self.library.book)
        integers, floats = [], []
        for argument, ctype in zip(arguments, self.argtypes, strict=True):
            if ctype is ctypes.c_float:
                floats.append(struct.pack("<d", argument))
            elif ctype is ctypes.c_void_p and argument:
                integers.append(struct.pack("<qqq", 1, *calls.place(argument)))
            else:
                integers.append(struct.pack("<qqq", 0, argument or 0, 0))
        name = self.name.encode().ljust(NAME_BYTES, b"\0")
        counts = struct.pack("<qq", len(integers), len(floats))
        content = calls.content() + name + counts + b"".join(integers + floats)
        result = self.library.run(content)
        calls.copy_back(result[8 + NAME_BYTES :])
        if self.restype is ctypes.c_char_p:
            return result[8 : 8 + NAME_BYTES].rstrip(b"\0")
        number = int.from_bytes(result[:8], "little", signed=True)
        return None if self.restype is None else self.restype(number).value


class ArmLibrary:
    def __init__(self, program: Path, folder: Path, book: AddressBook) -> None:
        self.program, self.folder, self.book = program, folder, book
        self.functions: dict[str, ArmFunction] = {}

    def __getattr__(self, name: str) -> ArmFunction:
        return self.functions.setdefault(name, ArmFunction(self, name))

    def run(self, content: bytes) -> bytes:
        call, result = self.folder / "call", self.folder / "result"
        call.write_bytes(content)
        command = [EMULATOR, "-cpu", "max", str(self.program), str(call), str(result)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{done.returncode}: {done.stderr}"
        return result.read_bytes()
