"""The judge: runs the test, whose calls of the function go to the candidate's process.

The function under test is a proxy. What the candidate returns is decoded into plain data before
the test compares it, and the test's expected values never leave this process.
"""

import builtins
import os

from peagle.bench.quality.sandbox.child.confine import Refusal, confine
from peagle.bench.quality.sandbox.child.wire import (
    UnsupportedValue,
    decode,
    decode_fields,
    encode,
    read_frame,
    write_frame,
)


class CandidateFailed(Exception):
    """The candidate ended, or sent what is no reply. The verdict is then "fail" in any case."""


class Proxy:
    """The function under test, as the test sees it."""

    def __init__(self, calls: int, replies: int):
        self.calls = calls
        self.replies = replies
        self.failed = False  # also where the test catches every exception
        self.unsupported: str | None = None

    def __call__(self, *positional: object, **named: object) -> object:
        try:
            call = encode({"positional": positional, "named": named})
        except UnsupportedValue as error:
            self.unsupported = f"the test calls the function with {error}"
            raise
        try:
            write_frame(self.calls, call)
            kind, *values = self.read_reply()
            if kind == "raised":
                name, message = values
                error_class = getattr(builtins, str(name))
                assert issubclass(error_class, Exception)
            else:
                result, changed = values
                copy_changes(changed, positional)
        except BaseException as error:
            self.failed = True
            raise CandidateFailed from error
        if kind == "raised":
            raise make_exception(error_class, message)
        return result

    def read_reply(self) -> list:
        reply = decode(read_frame(self.replies))
        assert isinstance(reply, list)
        return reply


def copy_changes(changed: dict, arguments: tuple) -> None:
    """What the candidate changed in place, by index, into the test's own lists, dicts and sets."""
    for index, content in changed.items():
        argument = arguments[index]
        if isinstance(argument, (list, bytearray)):
            argument[:] = content
        elif isinstance(argument, (dict, set)):
            argument.clear()
            argument.update(content)


def make_exception(error_class: type, message: object) -> Exception:
    try:
        return error_class(message)
    except TypeError:  # UnicodeError's subclasses want five arguments
        return Exception(message)


def run_judge(job: dict, tests_descriptor: int, proxy: Proxy) -> str:
    """The verdict: "pass" with the barriers that hold, "fail", "unsupported" or "refused"."""
    try:
        tests = decode_fields(read_frame(tests_descriptor))
        os.close(tests_descriptor)
        holding = confine(job["barriers"], job["read_paths"])
        kind, *words = proxy.read_reply()
        if kind != "confined":
            return f"refused {words[0]}"
    except (Refusal, OSError) as error:
        return f"refused {error}"
    try:
        assert proxy.read_reply() == ["loaded"]
        run_test(tests, job["entry_point"], proxy)
    except BaseException:  # whatever a test raises, SystemExit too
        proxy.failed = True
    if proxy.unsupported is not None:
        return f"unsupported {proxy.unsupported}"
    return "fail" if proxy.failed else f"pass {' '.join(holding)}"


def run_test(tests: dict, entry_point: str, proxy: Proxy) -> None:
    namespace: dict = {"__name__": "__main__"}
    exec(compile(tests["setup"], "setup.py", "exec"), namespace)
    namespace[entry_point] = proxy
    exec(compile(tests["test"], "test.py", "exec"), namespace)
    namespace["check"](proxy)
