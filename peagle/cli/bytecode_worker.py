"""Compile Python files to bytecode in several processes; parallel_bytecode.py starts this program.

    python -I -S bytecode_worker.py PROCESSES < FILES, one path per line

It uses the standard library only: importing more would take as long as compiling. A file that is
not compiled here is compiled by the process that imports it, and fails there.
"""

import os
import sys
from contextlib import suppress
from py_compile import PycInvalidationMode, compile


def main(count: int) -> None:
    """Files come in the order of their imports: each process takes every `count`-th of them."""
    paths = sys.stdin.read().splitlines()
    children = []
    for i in range(count):
        child = os.fork()
        if child == 0:
            compile_files(paths[i::count])
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def compile_files(paths: list[str]) -> None:
    """Bytecode appears complete or not at all, as that of an import."""
    for path in paths:
        with suppress(Exception):
            compile(path, doraise=True, invalidation_mode=PycInvalidationMode.TIMESTAMP)


if __name__ == "__main__":
    main(int(sys.argv[1]))
