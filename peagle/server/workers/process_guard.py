"""A command on a leash: it runs until it ends or the leash is let go of, and then nothing of it is left.

    python leash.py SOCKET COMMAND ...

Standard input is a pipe that only our parent holds: its end is the parent's end, even by SIGKILL. SIGTERM and SIGINT
are passed on. What the command started and left behind becomes ours (a subreaper's), and is killed. A file of its own
that needs nothing of the package: it starts in a few milliseconds.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
KILL = 10.0  # seconds for killed processes to be gone
ORPHANED = 0.5  # seconds until a parent that let go because it died is seen to be dead


def prctl(option: int, value: int) -> None:
    with contextlib.suppress(
        OSError, AttributeError
    ):  # Linux only; elsewhere the parent kills the process group
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def children() -> list[int]:
    """Our own, and those that lost their parents."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            if int(entry.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(entry.parent.name))
    return found


def end_all() -> None:
    """Killing a process makes its children ours: again, until there are none."""
    end = time.monotonic() + KILL
    while time.monotonic() < end:
        for pid in children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


def tidy(socket: Path) -> None:
    """Who died cannot: the socket, and its folder when the last one is gone."""
    with contextlib.suppress(OSError):
        socket.unlink(missing_ok=True)
        socket.parent.rmdir()


def main(socket: Path, command: list[str]) -> int:
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    ours, parent, free = os.getpid(), os.getppid(), threading.Event()

    def let_go() -> None:
        """When nobody holds us any more."""
        while os.read(0, 4096):
            pass
        free.set()
        end_all()
        time.sleep(ORPHANED)
        if os.getppid() != parent:
            tidy(socket)
        os._exit(128 + signal.SIGKILL)

    def bind() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != ours:
            os._exit(1)

    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=bind)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: child.send_signal(number))
    letting_go = threading.Thread(target=let_go, daemon=True)
    letting_go.start()
    code = child.wait()
    if free.is_set():
        letting_go.join()
    end_all()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.stdout.flush()
    os._exit(main(Path(sys.argv[1]), sys.argv[2:]))
