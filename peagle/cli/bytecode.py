"""Python's bytecode of the installed packages, for machines that have none and write none.

Images often install packages without it (`pip install --no-compile`, `uv pip install`) and set
PYTHONDONTWRITEBYTECODE, or their packages are read-only. Then every process compiles thousands of
source files whenever it starts.
"""

import sys
from collections.abc import MutableMapping
from importlib.util import cache_from_source, find_spec
from os import W_OK, access
from pathlib import Path

from peagle.paths import cache_home, is_writable

PREFIX_VARIABLE = "PYTHONPYCACHEPREFIX"
DONT_WRITE_VARIABLE = "PYTHONDONTWRITEBYTECODE"
LARGEST_PACKAGE = "torch"
FIXED_TIME = 366 * 86400 * 11  # 1981: image builders set the times of files to 1970 or 1980.


def keep_bytecode(environment: MutableMapping[str, str], package: str = LARGEST_PACKAGE) -> None:
    """Let this process and its children keep bytecode under PEAGLE_HOME, if they compile anew.

    Call it before large packages are imported. PYTHONDONTWRITEBYTECODE keeps `__pycache__` folders
    out of source trees and images. It is removed here, because with a prefix Python writes
    bytecode to PEAGLE_HOME only. A user who has set PYTHONPYCACHEPREFIX, even to nothing, keeps
    that, and nothing changes where PEAGLE_HOME is unknown or cannot be written.
    """
    if PREFIX_VARIABLE in environment or sys.pycache_prefix is not None:
        return
    try:
        folder = cache_home().absolute() / "bytecode"
    except RuntimeError:  # There is no home directory.
        return
    if compiles_anew(package) and is_writable(folder):
        sys.pycache_prefix = environment[PREFIX_VARIABLE] = str(folder)
        sys.dont_write_bytecode = False
        environment.pop(DONT_WRITE_VARIABLE, None)


def compiles_anew(package: str) -> bool:
    """Whether each process compiles `package`: Python neither has its bytecode nor may write it.

    Python recognizes a changed source by its time and size. Bytecode outlives an image in
    PEAGLE_HOME, so sources whose times are fixed do not count: an equal size could be a change.
    """
    spec = find_spec(package)
    if spec is None or not spec.has_location or spec.origin is None:
        return False
    source = Path(spec.origin)
    if Path(cache_from_source(source)).exists():
        return False
    times = [file.stat().st_mtime for file in (source, Path(__file__))]
    return min(times) > FIXED_TIME and (sys.dont_write_bytecode or not access(source.parent, W_OK))
