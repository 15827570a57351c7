"""Mixtures of experts on one GPU: `peagle bench-step` for a list of measurements, in order.

    python -m benchmarks.engine.moe OUT [NAME ...] [--budget 560]

Every measurement has a process of its own, a time limit, OUT/NAME.json (written after each of its
cells, so that a process that is stopped loses one cell) and OUT/NAME.log. NAMEs are those of the
list below; without one all run. `--budget` ends the run after so many seconds: what has its file
already is skipped, so that the same command goes on.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.moe_figure import profile_options

BOTH = ["--methods", "none,p-eagle", "-k", "auto", "--concurrency", "1,8,64", "--repeats", "2"]
TREES = ["--methods", "p-eagle", "-k", "auto", "--tree", "0,31", "--concurrency", "1,8,64"]
TREES += ["--repeats", "2"]
EIGHT = ["--methods", "p-eagle", "-k", "auto", "--tree", "31", "--concurrency", "8"]
EIGHT += ["--repeats", "6"]
ONE = ["--methods", "none,p-eagle", "-k", "auto", "--concurrency", "1", "--repeats", "3"]

SHORT = ["--methods", "none,p-eagle", "-k", "5", "--concurrency", "1,8", "--repeats", "1"]
SHORT += ["--output", "128"]


@dataclass(frozen=True, slots=True)
class Measurement:
    name: str
    seconds: int
    arguments: list[str]


def headline(name: str, concurrency: str) -> Measurement:
    """Both methods at three K, with the published acceptance lengths."""
    load = ["--concurrency", concurrency, "--repeats", "2", *profile_options()]
    arguments = ["gpt-oss-20b", "--methods", "eagle3,p-eagle", "-k", "3,5,7", *load]
    return Measurement(name, 540, arguments)


MEASUREMENTS = [
    Measurement("gpt-oss-20b", 240, ["gpt-oss-20b", *BOTH]),
    Measurement("qwen3-30b-a3b", 300, ["qwen3-30b-a3b", *BOTH]),
    Measurement("gpt-oss-20b-mxfp4", 240, ["gpt-oss-20b", "--experts", "mxfp4", *BOTH]),
    Measurement("gpt-oss-120b-mxfp4", 300, ["gpt-oss-120b", "--experts", "mxfp4", *SHORT]),
    Measurement("gpt-oss-20b-trees", 150, ["gpt-oss-20b", *TREES]),
    Measurement("qwen3-30b-a3b-trees", 150, ["qwen3-30b-a3b", *TREES]),
    Measurement("gpt-oss-20b-eight", 80, ["gpt-oss-20b", *EIGHT]),
    Measurement("qwen3-30b-a3b-eight", 80, ["qwen3-30b-a3b", *EIGHT]),
    Measurement("gpt-oss-20b-one", 60, ["gpt-oss-20b", *ONE]),
    Measurement("qwen3-30b-a3b-one", 60, ["qwen3-30b-a3b", *ONE]),
    headline("headline-ends", "1,8,64"),
    headline("headline-between", "2,4,16,32"),
]


def run(measurement: Measurement, folder: Path, seconds: float) -> None:
    """Run it, and print the speed of every cell that it measured."""
    out = folder / f"{measurement.name}.json"
    command = [sys.executable, "-m", "peagle", "bench-step", *measurement.arguments]
    command += ["--dtype", "bfloat16", "--out", str(out)]
    start = time.monotonic()
    with (folder / f"{measurement.name}.log").open("w") as log:
        try:
            code = subprocess.run(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=seconds,
                check=False,
                env=os.environ | {"COLUMNS": "140"},
            ).returncode
            state = f"exit code {code}"
        except subprocess.TimeoutExpired:
            state = "stopped"
    print(f"{measurement.name}: {state} after {time.monotonic() - start:.0f} s", flush=True)
    for cell in json.loads(out.read_text())["cells"] if out.exists() else []:
        print(f"  {cell_line(cell)}", flush=True)


def cell_line(cell: dict[str, Any]) -> str:
    """p-eagle K=auto tree=31 c=8: 1,000 tokens/s, ..."""
    tree = f" tree={cell['tree']}" if cell["tree"] else ""
    share = cell["floor_ms"] / cell["step_ms"]
    return (
        f"{cell['method']} K={cell['k']}{tree} c={cell['concurrency']}:"
        f" {cell['tokens_per_second']:,.0f} tokens/s (mean {cell['mean_tokens_per_second']:,.0f}),"
        f" AL {cell['acceptance_length']:.2f},"
        f" {cell['step_ms']:.2f} ms, floor {share:.0%},"
        f" experts {cell['experts_touched']} / {cell['experts']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--budget", type=float, default=560.0, help="seconds for all of them")
    options = parser.parse_args()
    known = {measurement.name: measurement for measurement in MEASUREMENTS}
    unknown = [name for name in options.names if name not in known]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    options.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.budget
    for name in options.names or known:
        seconds = min(known[name].seconds, end - time.monotonic())
        if seconds > 20 and not (options.out / f"{name}.json").exists():
            run(known[name], options.out, seconds)


if __name__ == "__main__":
    main()
