"""A process that has loaded what it will keep: Python's garbage collector and its threads, told so.

Without it, each full collection walks through every object of torch and transformers, and a thread that wants the
interpreter back from another waits 5 ms for it: longer than a step takes on a GPU.
"""

import gc
import sys

SWITCH = 50e-6  # seconds a thread may keep the interpreter while others want it
YOUNG = 50_000  # new objects before a collection


def freeze_live_objects() -> None:
    """What is there now is not looked at again, until this is called once more."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, 20, 20)
    sys.setswitchinterval(SWITCH)
