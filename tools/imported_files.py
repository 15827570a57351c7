"""List the files of other packages that `peagle generate` imports, in the order of their imports.

    python -m tools.imported_files > peagle/cli/imported_files.txt

peagle/cli/parallel_bytecode.py compiles them where bytecode is missing. Run it where all of
`peagle[dev]` is installed, after an update of torch or transformers.
"""

import sys
import sysconfig
from collections.abc import Iterator
from importlib import import_module
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

# Modules that Triton imports when it compiles the first kernel for a GPU.
COMPILER_MODULES = (
    "triton.compiler.code_generator",
    "triton.backends.nvidia.compiler",
    "triton.backends.nvidia.driver",
)


class ImportOrder(MetaPathFinder):
    """Records which modules are imported; sys.modules has the order in which imports end."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def find_spec(self, name: str, *_: Any) -> None:
        self.names.append(name)


def main() -> None:
    order = ImportOrder()
    sys.meta_path.insert(0, order)
    generate()
    print("\n".join(dict.fromkeys(imported_files(order.names))))


def generate() -> None:
    """What `peagle generate` does, on a CPU."""
    from peagle.cli.load_pair import load_with_progress

    pair = load_with_progress("smollm2-135m", None, None, "cpu", "bfloat16", None, quiet=True)
    pair.generate("Hello", max_tokens=4)
    for name in COMPILER_MODULES:
        import_module(name)


def imported_files(names: list[str]) -> Iterator[str]:
    """Relative to the folder of installed packages."""
    folders = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")]
    for name in names:
        origin = getattr(getattr(sys.modules.get(name), "__spec__", None), "origin", None)
        if origin is None or not origin.endswith(".py"):
            continue
        for folder in folders:
            if Path(origin).is_relative_to(folder):
                yield Path(origin).relative_to(folder).as_posix()


if __name__ == "__main__":
    main()
