"""Runs a program that a model wrote: in a process of its own, without network, with limits on everything.

The child (sandboxed.py) sets its own limits before it runs a line of the program; here are the wall clock, an empty
folder to work in, an empty environment, and the verdict. A program passes if it came to its end, which is told by a
word that is chosen anew each time: no program says it by accident.
"""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

SECONDS = 20.0  # by the wall clock; 10 of the processor, see sandboxed.py
CHILD = Path(__file__).with_name("sandbox_child.py")


def passes(program: str, seconds: float = SECONDS, walls: str = "namespace,hook") -> bool:
    """Whether the program runs to its end. `walls`: against the network; fewer only to test each by itself."""
    word = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="peagle-sandbox-") as folder:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", str(CHILD), word, walls],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            told, _ = child.communicate(program.encode("utf-8", "replace"), timeout=seconds)
        except subprocess.TimeoutExpired:
            return False
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            child.kill()
            child.wait()
            if child.stdout is not None:
                child.stdout.close()
    return child.returncode == 0 and told.decode(errors="replace") == word
