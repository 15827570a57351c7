"""Run a command so that no process of it outlives its parent.

    python process_guard.py SOCKET COMMAND ...

Standard input is a pipe that only the parent holds: it ends when the parent ends, even by SIGKILL.
Then the command and all its descendants are killed. SIGTERM and SIGINT are forwarded to the
command. This process is a subreaper: processes that the command leaves behind become its children,
and are killed too. The file imports nothing of the package, so that it starts in a few
milliseconds.
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

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
KILL_TIMEOUT_SECONDS = 10.0  # for killed processes to be gone
# Seconds after the end of standard input until a dead parent is replaced as the parent process.
ORPHAN_CHECK_SECONDS = 0.5
FOLDER_PREFIX = "peagle-"  # as in socket_folder.py
KILLED_EXIT_CODE = 128 + signal.SIGKILL


def prctl(option: int, value: int) -> None:
    # Linux only; elsewhere the parent kills the process group.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def child_pids() -> list[int]:
    """Return the children of this process, including adopted orphans."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid():
                pids.append(int(entry.parent.name))
    return pids


def kill_descendants() -> None:
    """Kill all children until there are none: the children of a killed process are adopted."""
    deadline = time.monotonic() + KILL_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        for pid in child_pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.01)


def remove_socket(socket: Path) -> None:
    """Clean up for a dead parent: remove the socket, and the folder that was made for sockets."""
    if socket.parent.name.startswith(FOLDER_PREFIX):
        import shutil

        shutil.rmtree(socket.parent, ignore_errors=True)
    else:
        socket.unlink(missing_ok=True)


def end_with_parent(parent: int, socket: Path, input_closed: threading.Event) -> None:
    """Wait for the end of standard input, then kill everything and exit. This runs on a thread."""
    while os.read(0, 4096):
        pass
    input_closed.set()
    kill_descendants()
    time.sleep(ORPHAN_CHECK_SECONDS)
    if os.getppid() != parent:
        remove_socket(socket)
    os._exit(KILLED_EXIT_CODE)


def main(socket: Path, command: list[str]) -> int:
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    guard = os.getpid()
    parent = os.getppid()

    def die_with_guard() -> None:
        """Let the kernel kill the command when the guard ends; runs in the new process."""
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(1)

    # Descriptors that the guard has inherited, like a listening socket, are passed on.
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, preexec_fn=die_with_guard, close_fds=False
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: child.send_signal(number))
    input_closed = threading.Event()
    watcher = threading.Thread(
        target=end_with_parent, args=(parent, socket, input_closed), daemon=True
    )
    watcher.start()
    code = child.wait()
    if input_closed.is_set():
        watcher.join()
    kill_descendants()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.stdout.flush()
    os._exit(main(Path(sys.argv[1]), sys.argv[2:]))
