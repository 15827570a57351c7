"""Landlock: the files that a process may read, and the one folder where it may write.

The kernel enforces it for native code too, whatever road a program takes to a path (dir_fd,
sqlite3, ctypes). The numbers are those of linux/landlock.h.
"""

import ctypes
import os

from peagle.bench.quality.sandbox.child.libc import syscall

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
VERSION_FLAG = 1
PATH_BENEATH = 1
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
REFER, TRUNCATE, IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
ABI_1 = (1 << 13) - 1
FOLDER_RIGHTS = ABI_1 & ~EXECUTE & ~(1 << 6 | 1 << 9 | 1 << 10 | 1 << 11) | REFER | TRUNCATE
FILE_RIGHTS = WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
TCP_RIGHTS = 0b11  # bind, connect; ABI 4
ALL_SCOPES = 0b11  # abstract UNIX sockets, signals; ABI 6


class Ruleset(ctypes.Structure):
    _fields_ = (
        ("files", ctypes.c_uint64),
        ("network", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


class PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("rights", ctypes.c_uint64), ("parent", ctypes.c_int32))


def abi_version() -> int:
    """Raises OSError where the kernel has no Landlock, or it is not enabled."""
    return syscall(CREATE_RULESET, "Landlock", None, ctypes.c_size_t(0), ctypes.c_uint32(1))


def handled_rights(abi: int) -> Ruleset:
    files = ABI_1
    for since, right in ((2, REFER), (3, TRUNCATE), (5, IOCTL_DEV)):
        files |= right if abi >= since else 0
    return Ruleset(files, TCP_RIGHTS if abi >= 4 else 0, ALL_SCOPES if abi >= 6 else 0)


def restrict(read_paths: list[str], folder: str) -> None:
    """For this process and for ever; needs no_new_privs. Paths that do not exist are skipped."""
    abi = abi_version()
    handled = handled_rights(abi)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = syscall(
        CREATE_RULESET,
        "landlock_create_ruleset",
        ctypes.byref(handled),
        ctypes.c_size_t(size),
        ctypes.c_uint32(0),
    )
    for path in read_paths:
        allow(ruleset, path, (READ_FILE | READ_DIR) & handled.files)
    allow(ruleset, os.devnull, (READ_FILE | WRITE_FILE | TRUNCATE) & handled.files)
    allow(ruleset, folder, FOLDER_RIGHTS & handled.files)
    syscall(RESTRICT_SELF, "landlock_restrict_self", ctypes.c_int(ruleset), ctypes.c_uint32(0))
    os.close(ruleset)


def allow(ruleset: int, path: str, rights: int) -> None:
    try:
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    try:
        if not os.path.isdir(path):
            rights &= FILE_RIGHTS
        rule = PathRule(rights, parent)
        syscall(
            ADD_RULE,
            "landlock_add_rule",
            ctypes.c_int(ruleset),
            ctypes.c_int(PATH_BENEATH),
            ctypes.byref(rule),
            ctypes.c_uint32(0),
        )
    finally:
        os.close(parent)
