"""The child of sandbox.py: walls first, then the program from standard input. Only the standard library is there.

    network     a namespace without any interface, where the kernel lets us; and a hook that refuses every socket
    processes   none can be started: a limit, and the hook; root becomes nobody first
    files       written in the working folder only, and small
    time        10 s of the processor            memory   1 GiB

The hook is Python's audit hook: once set it cannot be taken away. It is a wall against careless programs; against
malicious ones the namespace and the limits stand, which the kernel keeps.
"""

import ctypes
import os
import resource
import sys

NEWUSER, NEWNET = 0x10000000, 0x40000000
NOBODY = 65534
CPU, MEMORY, FILE, OPEN = 10, 1 << 30, 1 << 20, 32
REFUSED = (
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
CHANGES = (
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.mkdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "shutil.",
)


def limit() -> None:
    for name, most in (
        (resource.RLIMIT_CPU, CPU),
        (resource.RLIMIT_AS, MEMORY),
        (resource.RLIMIT_FSIZE, FILE),
        (resource.RLIMIT_NOFILE, OPEN),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        resource.setrlimit(name, (most, most))


def leave_network() -> None:
    """Root may; anybody else within a user namespace of his own, where the kernel allows it."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.unshare(NEWNET if os.geteuid() == 0 else NEWUSER | NEWNET)


def become_nobody() -> None:
    """Root is bound by no limit on processes, and may read and kill everything: rather be nobody.

    Only where nobody can read the standard library, which is imported as it is needed.
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
        os.chown(".", NOBODY, NOBODY)
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)


def hook(folder: str):  # type: ignore[no-untyped-def]
    def inside(path: object) -> bool:
        if isinstance(path, int):
            return True
        return os.path.realpath(os.fsdecode(path)).startswith(folder + os.sep)  # type: ignore[arg-type]

    def refuse(event: str, args: tuple) -> None:
        if event.startswith(REFUSED):
            raise PermissionError(f"{event} is not allowed here")
        if event == "open" and writes(args) and args[0] is not None and not inside(args[0]):
            raise PermissionError("files are written in the working folder only")
        if event.startswith(CHANGES) and not all(
            inside(a) for a in args if isinstance(a, (str, bytes))
        ):
            raise PermissionError(f"{event} outside the working folder")

    return refuse


def writes(args: tuple) -> bool:
    mode, flags = args[1], args[2] or 0
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))


def main() -> None:
    word, walls = sys.argv[1], sys.argv[2].split(",")
    program = compile(sys.stdin.buffer.read(), "program.py", "exec")
    verdict = os.dup(1)
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(quiet, stream)
    sys.argv = ["program.py"]
    if "namespace" in walls:
        leave_network()
    become_nobody()
    limit()
    if "hook" in walls:
        sys.addaudithook(hook(os.path.realpath(os.getcwd())))
    exec(program, {"__name__": "__main__"})
    os.write(verdict, word.encode())


main()
