"""Runs a program that a model wrote against its test, where it can harm nothing.

    peagle -> judge: runs the test       -> candidate: runs the program
           <- verdict, at most 1,000 bytes  <- plain data, at most 8 MiB a call

Both are confined by the kernel (child/confine.py): no Python code is a boundary here. The candidate
is another process than the judge, so it has neither the test's expected values nor the descriptor
of the verdict.
"""

from peagle.bench.quality.sandbox.launch import find_sandbox
from peagle.bench.quality.sandbox.verdict import passes

__all__ = ["find_sandbox", "passes"]
