"""Worker: a process that keeps a model loaded and answers requests, one line of JSON each.

The first line that a worker prints says that it is ready. Requests are objects with a `kind`:

    {"kind": "describe"}                     versions, kernels, bytes of weights
    {"kind": "decode", "prompts": [[ids]], "max_tokens": 96}
                                             prefill_seconds, decode_seconds, decoded_tokens,
                                             answers
    {"kind": "prefill", "ids": [ids]}        prefill_seconds
    {"kind": "score", "ids": [ids], "path"}  saves the logits of every position (numpy's format)

peagle's worker also takes `method` and `int8`, which llama.cpp's does not have.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

from peagle.openmp import WAIT_POLICY

HERE = Path(__file__).parent
LLAMA_WORKER = HERE / "llama_worker.py"
ROOT = HERE.parents[1]
LOG_TAIL = 2000  # characters of a failed worker's log


class Worker:
    def __init__(self, command: list[str]) -> None:
        self.log: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            cwd=ROOT,
            # `import peagle` sets how OpenMP threads wait; llama.cpp must not inherit that.
            env={name: text for name, text in os.environ.items() if name != WAIT_POLICY},
        )
        self._read()

    def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"kind": kind} | fields) + "\n")
        self.process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            raise SystemExit(f"a worker ended: {self.log.read()[-LOG_TAIL:]}")
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()  # The worker ends with its input.
        self.process.wait()
        self.log.close()


def llama_worker(python: str, gguf: Path, threads: int, context: int, sequences: int = 1) -> Worker:
    numbers = map(str, (threads, context, sequences))
    return Worker([python, str(LLAMA_WORKER), str(gguf), *numbers])


def peagle_worker(pair: str, gguf: Path | None, dtype: str, threads: int, context: int) -> Worker:
    """`gguf`: runs as stored with the pair's drafters; None: the pair as other commands run it."""
    module = "benchmarks.llamacpp.peagle_worker"
    target = "" if gguf is None else str(gguf)
    numbers = map(str, (threads, context))
    return Worker([sys.executable, "-m", module, pair, target, dtype, *numbers])
