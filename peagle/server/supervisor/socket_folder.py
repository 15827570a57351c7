"""The folder of a server's Unix sockets. A process guard removes it if the server is killed."""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

from peagle.errors import UserError

# Length of the path of the temporary folder. With the rest of the path, a Unix socket's stays
# below 103 bytes, the limit on every system.
MAX_TMPDIR_BYTES = 72
PREFIX = "peagle-"


def create_socket_folder() -> Path:
    """Create a temporary folder that only this user can read. It is removed at exit."""
    try:
        root = tempfile.gettempdir()
        check_length(root)
        folder = tempfile.mkdtemp(prefix=PREFIX)
    except OSError as error:
        raise UserError(
            f"no folder for Unix sockets can be created ({error.strerror}): set TMPDIR to a folder"
            " that can be written"
        ) from error
    # A server that is closed in order has removed it. One that fails, or exits at once, has not.
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def check_length(root: str) -> None:
    if len(os.fsencode(root)) > MAX_TMPDIR_BYTES:
        raise UserError(
            f"the path of a Unix socket would be too long in {root}: set TMPDIR to a shorter path"
        )
