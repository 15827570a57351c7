"""Loading a pair, with progress bars for what is downloaded."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

from peagle.cli.application import err

if TYPE_CHECKING:
    from peagle.loaded import LoadedPair


def load_with_progress(
    pair: str,
    target: str | None,
    drafter: Path | None,
    device: str,
    dtype: str,
    context: int | None,
    quiet: bool,
) -> "LoadedPair":
    from peagle.engine.gc_tuning import collection_paused
    from peagle.progress import progress_bars
    from peagle.target.preload import preload
    from peagle.target.transformers_import import quick_imports

    started = time.perf_counter()
    with collection_paused():
        preload(device)
        # Before transformers, which is imported without some of its parts.
        import torch  # noqa: F401

        with quick_imports():
            from peagle.loaded import load

    with progress_bars(err, quiet=quiet) as progress:
        imported = time.perf_counter()
        loaded = load(
            pair,
            target=target,
            drafter=drafter,
            device=device,
            dtype=dtype,
            context=context,
            progress=progress,
        )
    loaded.startup.add("import", imported - started)
    loaded.startup.add("load", time.perf_counter() - imported)
    return loaded
