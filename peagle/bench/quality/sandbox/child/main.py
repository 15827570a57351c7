"""Where the sandbox's process starts: reads the job, forks the candidate, becomes the judge.

Standard input holds two frames: the job, which the candidate may know, and the test, which is read
after the fork so that the candidate's memory never holds it. The verdict goes to standard output,
which the candidate does not have. There is no secret word: a program that knows everything in its
process still cannot say "pass".
"""

import os

from peagle.bench.quality.sandbox.child.candidate import run_candidate
from peagle.bench.quality.sandbox.child.confine import (
    enter_namespaces,
    is_root,
    keep_descriptors,
)
from peagle.bench.quality.sandbox.child.judge import Proxy, run_judge
from peagle.bench.quality.sandbox.child.wire import decode_fields, read_frame


def main() -> None:
    job = decode_fields(read_frame(0))
    if is_root():  # before a user namespace hides it
        os.write(1, b"refused the process is still root")
        os._exit(1)
    namespaces = "namespaces" in job["barriers"] and enter_namespaces()
    calls, calls_in = os.pipe()
    replies, replies_in = os.pipe()
    if os.fork() == 0:
        try:
            keep_descriptors(calls, replies_in)
            run_candidate(job, calls, replies_in)
        finally:
            os._exit(1)
    tests, verdict_out = os.dup(0), os.dup(1)
    keep_descriptors(tests, verdict_out, calls_in, replies)
    verdict = run_judge(job, tests, Proxy(calls_in, replies))
    if namespaces:
        verdict += " namespaces"
    os.write(verdict_out, verdict.encode("utf-8", "replace")[:1000])
    os._exit(0)
