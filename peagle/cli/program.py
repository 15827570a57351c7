"""The program `peagle`."""

import os
import sys

from peagle.cli import app

# A command that leaves nothing to be done at the end. Freeing the modules of torch, the weights and
# the CUDA context one by one takes a second, and the system frees all of them at once.
QUICK_COMMAND = "generate"


def main() -> None:
    """Run the command of `sys.argv`, and exit with its code."""
    try:
        app()
    except SystemExit as end:
        if end.code in (None, 0) and sys.argv[1:2] == [QUICK_COMMAND]:
            exit_at_once()
        raise


def exit_at_once() -> None:
    """End this process, once its output is written. Returns if it cannot be written."""
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # Python has none for a descriptor that was closed.
                stream.flush()
    except (OSError, ValueError):  # A reader that is gone, a closed stream: Python reports it.
        return
    os._exit(0)
