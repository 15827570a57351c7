"""Runs scripts in separate processes that share the time for imports."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, os, sys, tempfile, traceback
names = {"__name__": "__main__"}
exec(json.loads(sys.stdin.readline()), names)
for line in sys.stdin:
    with tempfile.TemporaryFile() as output:
        if (pid := os.fork()) == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            code = 1
            try:
                exec(json.loads(line), names)
                code = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        _, status = os.waitpid(pid, 0)
        output.seek(0)
        answer = [os.waitstatus_to_exitcode(status), output.read().decode()]
        print(json.dumps(answer), flush=True)
"""


class ScriptServer:
    """Runs each script in a fork of a process that has executed the common first lines."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def send(self, script: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(script) + "\n")
        self._process.stdin.flush()

    def run(self, script: str) -> str:
        """The output of a script, which must succeed."""
        self.send(script)
        assert self._process.stdout is not None
        code, output = json.loads(self._process.stdout.readline())
        assert code == 0, output
        return str(output)


@contextmanager
def script_server(beginning: str, **environment: str) -> Iterator[ScriptServer]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    server = ScriptServer(process)
    server.send(beginning)
    try:
        yield server
    finally:
        process.communicate()


@contextmanager
def compiling_server(beginning: str) -> Iterator[ScriptServer]:
    """A server for scripts that compile Triton kernels instead of interpreting them."""
    with (
        TemporaryDirectory() as cache,
        script_server(beginning, TRITON_INTERPRET="0", TRITON_CACHE_DIR=cache) as server,
    ):
        yield server
