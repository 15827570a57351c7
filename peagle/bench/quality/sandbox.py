"""Runs a program that a model wrote: in its own process, without network, with limits.

The child (sandbox_child.py) sets its limits before it runs a line of the program. This side adds a
wall-clock timeout, an empty working folder and an empty environment, and decides the verdict. A
program passes if it runs to its end, which the child reports with a random token: no program prints
it by accident.
"""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

TIMEOUT_SECONDS = 20.0  # wall clock; sandbox_child.py limits the CPU time to 10 s
CHILD = Path(__file__).with_name("sandbox_child.py")
ALL_BARRIERS = "namespace,hook"


def passes(
    program: str, seconds: float = TIMEOUT_SECONDS, network_barriers: str = ALL_BARRIERS
) -> bool:
    """Whether the program runs to its end. Tests name fewer barriers to test each by itself."""
    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="peagle-sandbox-") as folder:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", str(CHILD), token, network_barriers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            output, _ = child.communicate(program.encode("utf-8", "replace"), timeout=seconds)
        except subprocess.TimeoutExpired:
            return False
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            child.kill()
            child.wait()
            if child.stdout is not None:
                child.stdout.close()
    return child.returncode == 0 and output.decode(errors="replace") == token
