"""The seccomp filter: an allow list of system calls, as a classic BPF program.

Each allowed call is one comparison and one return, so no jump is longer than the arguments' checks.
The kernel caches the calls that are always allowed (since 5.11): the length costs nothing there.
"""

import ctypes
import os

from peagle.bench.quality.sandbox.child import syscalls
from peagle.bench.quality.sandbox.child.libc import PR_SET_SECCOMP, prctl

MODE_FILTER = 2
LOAD_WORD, JUMP_EQUAL, JUMP_GREATER_EQUAL, RETURN = 0x20, 0x15, 0x35, 0x06
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
EPERM, ENOSYS = 1, 38
NUMBER_OFFSET, ARCH_OFFSET, ARGUMENTS_OFFSET = 0, 4, 16  # of struct seccomp_data
X32_BIT = 0x40000000  # calls of the x32 ABI have other numbers under the same architecture

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, constant


class FilterInstruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_ushort),
        ("jump_true", ctypes.c_ubyte),
        ("jump_false", ctypes.c_ubyte),
        ("constant", ctypes.c_uint),
    )


class FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.POINTER(FilterInstruction)))


def build_filter(machine: str) -> list[Instruction]:
    column = ("x86_64", "aarch64").index(machine)
    program: list[Instruction] = [
        (LOAD_WORD, 0, 0, ARCH_OFFSET),
        (JUMP_EQUAL, 1, 0, syscalls.AUDIT_ARCH[machine]),
        (RETURN, 0, 0, KILL),
        (LOAD_WORD, 0, 0, NUMBER_OFFSET),
        (JUMP_GREATER_EQUAL, 0, 1, X32_BIT),
        (RETURN, 0, 0, KILL),
    ]
    for _, *numbers in syscalls.ALLOWED:
        number = numbers[column]
        if number is not None:
            program += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    for _, x86_64, aarch64, argument, values in syscalls.SELECTED:
        checks: list[Instruction] = [(LOAD_WORD, 0, 0, ARGUMENTS_OFFSET + 8 * argument)]
        for value in values:
            checks += [(JUMP_EQUAL, 0, 1, value), (RETURN, 0, 0, ALLOW)]
        checks.append((RETURN, 0, 0, ERRNO | EPERM))
        program += [(JUMP_EQUAL, 0, len(checks), (x86_64, aarch64)[column]), *checks]
    program += [
        (JUMP_EQUAL, 0, 1, syscalls.CLONE3),
        (RETURN, 0, 0, ERRNO | ENOSYS),
        (RETURN, 0, 0, ERRNO | EPERM),
    ]
    return program


def install_filter() -> None:
    """For this process and for ever; needs no_new_privs. Raises OSError where it is refused."""
    instructions = build_filter(os.uname().machine)
    array = (FilterInstruction * len(instructions))()
    for index, instruction in enumerate(instructions):
        array[index] = FilterInstruction(*instruction)
    program = FilterProgram(len(instructions), array)
    prctl(PR_SET_SECCOMP, MODE_FILTER, ctypes.addressof(program))
