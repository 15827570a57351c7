"""Running Triton kernels in Triton's interpreter, in a process of its own."""

import os
import subprocess
import sys

import pytest

# Triton reads the variable when it is imported: the interpreter needs a process of its own.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by test_in_the_interpreter")
not_interpreted = pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")


def run_interpreted_tests(*files: str) -> subprocess.CompletedProcess[str]:
    """Run the tests of files whose names contain `interpreted`, all in one process."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "interpreted"]
    env = os.environ | {"TRITON_INTERPRET": "1"}
    return subprocess.run([*command, *files], env=env, capture_output=True, text=True)
