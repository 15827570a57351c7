"""System calls that Python's standard library does not have; each raises OSError if it fails."""

import ctypes
import os

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_CAPBSET_DROP = 24
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
CAPABILITY_VERSION = 0x20080522
LAST_CAPABILITY = 40


def checked(result: int, name: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def prctl(option: int, second: int = 0, third: int = 0) -> None:
    words = (ctypes.c_ulong(word) for word in (second, third, 0, 0))
    checked(LIBC.prctl(option, *words), f"prctl({option})")


def unshare(flags: int) -> None:
    checked(LIBC.unshare(flags), "unshare")


def syscall(number: int, name: str, *arguments: object) -> int:
    return checked(LIBC.syscall(ctypes.c_long(number), *arguments), name)


def drop_capabilities() -> None:
    """A user namespace gives its creator all capabilities in it; none is kept."""
    for capability in range(LAST_CAPABILITY + 1):
        LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # refused without CAP_SETPCAP: no matter
    LIBC.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    empty = (ctypes.c_uint32 * 6)()
    checked(LIBC.capset(header, empty), "capset")
