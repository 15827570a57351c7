"""Measure several methods and draft lengths of vLLM with step.py, one process each.

    PYTHONPATH=.:VLLM python benchmarks/vllm/step_group.py OUT SHAPE none:0,p-eagle:3,eagle3:3 1,8
        [--at-once 2] [--seconds 300] [--profile p-eagle=.8,.6 --profile eagle3=.7,.5] [OPTIONS]

A cell may name another shape: gpt-oss-20b/p-eagle:5. All K of a shape share what vLLM compiles, so
a group of two shapes, and then the next K of both, is faster than two K of one shape at once.

Processes of a group load at the same time; when all of them are ready, they are measured one after
another. OUT gets a JSON line per cell as soon as it is measured. `--seconds` limits the loading of
a group, and each measurement. OPTIONS are those of step.py.

Memory: a process takes the weights, `--kv-gib` and about 5 GiB. On a GPU of 139 GiB that is two of
gpt-oss-20b at a time, two of qwen3-30b-a3b with `--kv-gib 3`, or one of each.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

STEP = Path(__file__).with_name("step.py")


class Worker:
    """One process of step.py. Its lines that are JSON are kept, the others are printed."""

    def __init__(self, method: str, k: str, go: Path, options: argparse.Namespace) -> None:
        shape, _, method = method.rpartition("/")
        shape = shape or options.shape
        self.name = f"{shape} {method}:{k}"
        self.go = go
        self.out: Path = options.out
        self.ready = False
        profiles = dict(word.split("=") for word in options.profile)
        profile = ["--profile", profiles[method]] if method in profiles else []
        arguments = [shape, method, k, options.concurrency, str(go), *profile]
        self.process = subprocess.Popen(
            [sys.executable, str(STEP), *arguments, *options.extra],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            print(f"[{self.name}] {line}", end="", flush=True)
            record = parse_line(line)
            self.ready |= "ready" in record
            if "tokens_per_second" in record:
                with self.out.open("a") as file:
                    file.write(json.dumps(record) + "\n")

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def measure(self, seconds: float) -> None:
        self.go.touch()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            print(f"[{self.name}] did not end within {seconds:.0f} s", flush=True)
        self.stop()

    def stop(self) -> None:
        if self.running:
            self.process.kill()
        self.process.wait()
        self.reader.join(5)


def parse_line(line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def run_group(cells: list[str], options: argparse.Namespace, folder: Path) -> None:
    workers = []
    try:
        for cell in cells:
            method, k = cell.split(":")
            go = folder / f"go-{cell.replace('/', '-')}"
            workers.append(Worker(method, k, go, options))
        end = time.monotonic() + options.seconds
        while time.monotonic() < end and any(x.running and not x.ready for x in workers):
            time.sleep(0.5)
        for worker in workers:
            if not (worker.running and worker.ready):
                print(f"[{worker.name}] was not ready in time, or failed", flush=True)
                worker.stop()  # Loading would disturb the others.
        for worker in workers:
            if worker.running:
                worker.measure(options.seconds)
    finally:
        for worker in workers:
            worker.stop()


def main(options: argparse.Namespace) -> None:
    cells = options.cells.split(",")
    with tempfile.TemporaryDirectory() as folder:
        for start in range(0, len(cells), options.at_once):
            run_group(cells[start : start + options.at_once], options, Path(folder))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Several cells of vLLM, one process each.")
    parser.add_argument("out", type=Path)
    parser.add_argument("shape")
    parser.add_argument("cells", help="METHOD:K,METHOD:K")
    parser.add_argument("concurrency")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--profile", action="append", default=[], help="METHOD=.8,.6,.4")
    options, extra = parser.parse_known_args()
    options.extra = extra
    return options


if __name__ == "__main__":
    main(parse_arguments())
