"""Tuning of Python's garbage collector and thread switching for a process that runs an engine.

Without it, each full collection visits every object of torch and transformers, and a thread that
needs the interpreter waits up to 5 ms for it: longer than a step on a GPU takes.
"""

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SWITCH_INTERVAL_SECONDS = 50e-6  # A thread keeps the interpreter this long while others wait.
NEW_OBJECTS_PER_COLLECTION = 50_000


@contextmanager
def collection_paused() -> Iterator[None]:
    """Import torch and more inside this block without collections, and freeze what is created.

    Hardly any of it ever dies, and visiting it takes a sixth of the time of the imports. Nothing
    changes if torch is imported already.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def freeze_live_objects() -> None:
    """Freeze live objects so that the garbage collector skips them.

    Call it again after loading more models: objects that died meanwhile are collected first, and
    their memory goes back to the system.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    trim_heap()
    gc.set_threshold(NEW_OBJECTS_PER_COLLECTION, 20, 20)
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)


def trim_heap() -> None:
    """Give freed memory back to the system, which only glibc is asked for: about 140 MB.

    Loading frees many tensors of a few megabytes, which glibc keeps for the next ones.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
