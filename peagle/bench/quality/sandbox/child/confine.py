"""The barriers around one process, set before it runs a line of foreign code.

    limits      10 s of CPU, 1 GiB, files of 1 MiB, 32 open files, no other process, no core
    privileges  no capability, and no way to gain one
    landlock    reads the standard library, writes in its working folder
    seccomp     an allow list of system calls: no process, signal, socket, mount, key, ptrace
    namespaces  users, network, processes, IPC: where the kernel allows them, as a second wall

All but the namespaces must hold, or nothing is run. bubblewrap, where it is used, brings its own
namespaces and file system, and Landlock is then the second wall.
"""

import os
import resource

from peagle.bench.quality.sandbox.child import landlock, libc, seccomp

SIGKILL = 9  # the module signal imports enum, which takes longer than all the rest here
MAX_CPU_SECONDS = 10
MAX_MEMORY_BYTES = 1 << 30
MAX_FILE_BYTES = 1 << 20
MAX_OPEN_FILES = 32
# New namespaces of users, network, processes, IPC and host names.
NAMESPACES = 0x10000000 | 0x40000000 | 0x20000000 | 0x08000000 | 0x04000000


class Refusal(Exception):
    """A barrier that must hold cannot be set."""


def is_root() -> bool:
    return 0 in os.getresuid()


def enter_namespaces() -> bool:
    """The next fork is the first process of the new namespace."""
    try:
        libc.unshare(NAMESPACES)
    except OSError:
        return False
    return True


def keep_descriptors(*kept: int) -> None:
    """Close every other one; standard input, output and error become /dev/null."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    start = 3
    for descriptor in sorted(kept):
        os.closerange(start, descriptor)
        start = max(start, descriptor + 1)
    os.closerange(start, resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def set_limits() -> None:
    for name, maximum in (
        (resource.RLIMIT_CPU, MAX_CPU_SECONDS),
        (resource.RLIMIT_AS, MAX_MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, MAX_FILE_BYTES),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        hard = resource.getrlimit(name)[1]
        if hard != resource.RLIM_INFINITY:
            maximum = min(maximum, hard)
        resource.setrlimit(name, (maximum, maximum))


def confine(barriers: list[str], read_paths: list[str]) -> list[str]:
    """The barriers that hold. Raises Refusal if one of `barriers` cannot be set."""
    libc.prctl(libc.PR_SET_PDEATHSIG, SIGKILL)
    libc.prctl(libc.PR_SET_DUMPABLE, 0)
    libc.prctl(libc.PR_SET_NO_NEW_PRIVS, 1)
    libc.drop_capabilities()
    set_limits()
    holding = ["limits", "privileges"]
    if "landlock" in barriers or "landlock if possible" in barriers:
        try:
            landlock.restrict(read_paths, ".")
            holding.append("landlock")
        except OSError as error:
            if "landlock" in barriers:
                raise Refusal(str(error)) from error
    if "seccomp" in barriers:
        try:
            seccomp.install_filter()
            holding.append("seccomp")
        except OSError as error:
            raise Refusal(f"seccomp: {error}") from error
    return holding
