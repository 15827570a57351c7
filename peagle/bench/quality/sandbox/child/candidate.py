"""The candidate: runs the program that a model wrote, then answers the judge's calls.

Everything in this process belongs to the program: it may write any reply it likes. A reply is plain
data or the name of a built-in exception, so all it can do is to give an answer.
"""

import builtins

from peagle.bench.quality.sandbox.child.confine import Refusal, confine
from peagle.bench.quality.sandbox.child.wire import (
    UnsupportedValue,
    decode_fields,
    encode,
    read_frame,
    write_frame,
)

MUTABLE = (list, dict, set, bytearray)


def run_candidate(job: dict, calls: int, replies: int) -> None:
    """Returns, or raises, when the judge is gone or the program has ended the process."""
    try:
        holding = confine(job["barriers"], job["read_paths"])
    except (Refusal, OSError) as error:
        write_frame(replies, encode(["refused", str(error)]))
        return
    write_frame(replies, encode(["confined", " ".join(holding)]))
    namespace: dict = {"__name__": "__main__"}
    exec(compile(job["solution"], "program.py", "exec"), namespace)
    write_frame(replies, encode(["loaded"]))
    while True:
        reply = answer(namespace, job["entry_point"], decode_fields(read_frame(calls)))
        try:
            write_frame(replies, reply)
        except UnsupportedValue as error:
            write_frame(replies, raised(error))


def answer(namespace: dict, entry_point: str, call: dict) -> bytes:
    positional = call["positional"]
    sent = [encode(argument) for argument in positional]
    try:
        result = namespace[entry_point](*positional, **call["named"])
        changed = {
            index: argument
            for index, argument in enumerate(positional)
            if isinstance(argument, MUTABLE) and encode(argument) != sent[index]
        }
        return encode(["returned", result, changed])
    except Exception as error:
        return raised(error)


def raised(error: Exception) -> bytes:
    """The nearest built-in class of the exception: tests expect ValueError and the like."""
    for kind in type(error).__mro__:
        if getattr(builtins, kind.__name__, None) is kind:
            return encode(["raised", kind.__name__, str(error)[:1000]])
    raise error
