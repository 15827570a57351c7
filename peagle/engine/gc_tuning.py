"""Tuning of Python's garbage collector and thread switching for a process that serves requests.

Without it, each full collection visits every object of torch and transformers, and a thread that
needs the interpreter waits up to 5 ms for it: longer than a step on a GPU takes.
"""

import ctypes
import gc
import sys

SWITCH_INTERVAL_SECONDS = 50e-6  # A thread keeps the interpreter this long while others wait.
NEW_OBJECTS_PER_COLLECTION = 50_000


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
