"""The child of sandbox.py: sets up the barriers, then runs the program from standard input.

Only the standard library is used.

    network     a namespace without interfaces, where the kernel allows it; the hook refuses
                every socket
    processes   none can be started: a limit, and the hook; root becomes the user nobody first
    files       written in the working folder only, and small
    time        10 s of CPU            memory   1 GiB

The hook is Python's audit hook: once set it cannot be removed. It stops careless programs; against
malicious ones the namespace and the limits remain, which the kernel enforces.
"""

import ctypes
import os
import resource
import sys

CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
NOBODY_ID = 65534
MAX_CPU_SECONDS = 10
MAX_MEMORY_BYTES = 1 << 30
MAX_FILE_BYTES = 1 << 20
MAX_OPEN_FILES = 32
FORBIDDEN_EVENTS = (
    "socket.",
    "subprocess.",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "os.kill",
    "pty.",
    "ctypes.",
    "os.startfile",
    "signal.pthread_kill",
    "os.chmod",
    "os.chown",
    "os.setxattr",
    "ftplib.",
    "urllib.",
)
FILE_CHANGE_EVENTS = (
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.mkdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "shutil.",
)


def set_limits() -> None:
    for name, maximum in (
        (resource.RLIMIT_CPU, MAX_CPU_SECONDS),
        (resource.RLIMIT_AS, MAX_MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, MAX_FILE_BYTES),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        resource.setrlimit(name, (maximum, maximum))


def leave_network() -> None:
    """Enter a network namespace; other users than root need their own user namespace for that."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.unshare(CLONE_NEWNET if os.geteuid() == 0 else CLONE_NEWUSER | CLONE_NEWNET)


def become_nobody() -> None:
    """Drop root, which no process limit binds and which may read and kill everything.

    Only where the user nobody can read the standard library, which is imported when it is needed.
    """
    library = os.path.realpath(os.__file__)
    parents = [library]
    while parents[-1] != os.sep:
        parents.append(os.path.dirname(parents[-1]))
    if (
        os.geteuid() == 0
        and all(os.stat(p).st_mode & 0o001 for p in parents[1:])
        and os.stat(library).st_mode & 0o004
    ):
        os.chown(".", NOBODY_ID, NOBODY_ID)
        os.setgroups([])
        os.setresgid(NOBODY_ID, NOBODY_ID, NOBODY_ID)
        os.setresuid(NOBODY_ID, NOBODY_ID, NOBODY_ID)


def audit_hook(folder: str):  # type: ignore[no-untyped-def]
    def inside(path: int | str | bytes) -> bool:
        if isinstance(path, int):
            return True
        return os.path.realpath(os.fsdecode(path)).startswith(folder + os.sep)

    def refuse(event: str, args: tuple) -> None:
        if event.startswith(FORBIDDEN_EVENTS):
            raise PermissionError(f"{event} is not allowed here")
        if event == "open" and opens_to_write(args) and args[0] is not None and not inside(args[0]):
            raise PermissionError("files can be written in the working folder only")
        if event.startswith(FILE_CHANGE_EVENTS) and not all(
            inside(a) for a in args if isinstance(a, (str, bytes))
        ):
            raise PermissionError(f"{event} outside the working folder")

    return refuse


def opens_to_write(args: tuple) -> bool:
    """`args` of the audit event "open": path, mode, flags."""
    mode = args[1]
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    flags = args[2] or 0
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))


def main() -> None:
    token = sys.argv[1]
    barriers = sys.argv[2].split(",")
    program = compile(sys.stdin.buffer.read(), "program.py", "exec")
    verdict = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    sys.argv = ["program.py"]
    if "namespace" in barriers:
        leave_network()
    become_nobody()
    set_limits()
    if "hook" in barriers:
        sys.addaudithook(audit_hook(os.path.realpath(os.getcwd())))
    exec(program, {"__name__": "__main__"})
    os.write(verdict, token.encode())


main()
