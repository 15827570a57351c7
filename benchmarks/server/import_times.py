"""Where the start of an engine process goes before weights are loaded, one thing after the other.

    python -m benchmarks.server.import_times

An engine process does some of it at the same time (peagle/target/preload.py).
"""

import json
import sys
import threading
import time
from importlib import import_module

from peagle.target.preload import LATER_MODULES, create_context, load_libraries
from peagle.target.transformers_import import quick_imports, without_command_lines


def main() -> None:
    seconds: dict[str, float] = {}
    started = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal started
        now = time.perf_counter()
        seconds[name] = round(now - started, 2)
        started = now

    load_libraries("cpu", threading.Event())
    lap("libraries")
    import torch

    lap("torch")
    if torch.cuda.is_available():
        lap("is_available")
        create_context("cuda")
        lap("context")
        torch.ones(1, device="cuda")
        lap("first tensor")
    with without_command_lines():
        for name in LATER_MODULES:
            import_module(name)
    lap("requirements")
    with quick_imports():
        import_module("transformers.models.llama.modeling_llama")
        lap("transformers")
        import_module("peagle.loaded")
    lap("peagle")
    print(json.dumps(seconds | {"modules": len(sys.modules)}), flush=True)


if __name__ == "__main__":
    main()
