"""Measure decoding on a quiet machine, and while another process takes one of its cores.

    python -m benchmarks.cpu.busy [--tokens 64] [--rounds 3] [--json]

Each setting has a process of its own, which loads the default pair once; the processes take turns.
`default` is what `import peagle` sets. The others show what a fixed setting would give: PyTorch's
OpenMP threads that spin for about 0.1 ms, or for milliseconds as GNU's runtime does by default, and
one thread less, whose speed on the quiet machine is the fair share: all cores but the one that the
other process has.
The best round counts on the quiet machine, and the median while a core is busy.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

MIN_FAIR_SHARE = 0.6  # of the fair share, with one core busy
MAX_QUIET_LOSS = 0.05  # against the best fixed setting
CHANGED_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")
FAIR = "one thread less"


def settings(cores: int) -> dict[str, dict[str, str]]:
    return {
        "default": {},
        "short spinning": {"GOMP_SPINCOUNT": "5000"},
        "spinning": {"GOMP_SPINCOUNT": "300000"},
        FAIR: {"OMP_NUM_THREADS": str(max(1, cores - 1))},
    }


def answer_requests(tokens: int) -> None:
    """The child process: one line with tokens per second for each line that is read."""
    from peagle.evaluate.demo import PROMPTS, WARM_UP_TOKENS, decoding_speed
    from peagle.loaded import load

    pair = load()
    pair.generate("Hello", max_tokens=WARM_UP_TOKENS)
    print("ready", flush=True)
    for _ in sys.stdin:
        answers = [pair.generate(prompt, max_tokens=tokens) for prompt in PROMPTS.values()]
        print(decoding_speed(answers), flush=True)


class Decoder:
    """A child process with one setting."""

    def __init__(self, setting: dict[str, str], tokens: int) -> None:
        kept = {name: text for name, text in os.environ.items() if name not in CHANGED_VARIABLES}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.cpu.busy", "--child", "--tokens", str(tokens)],
            env=kept | setting,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.read_line()

    def read_line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the decoder ended with exit code {self.process.wait()}")
        return line

    def measure(self) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self.read_line())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


@contextmanager
def busy_core() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


@dataclass(frozen=True)
class BusyResult:
    """Tokens per second by setting."""

    cores: int
    quiet: dict[str, float]
    busy: dict[str, float]

    @property
    def quiet_loss(self) -> float:
        return 1 - self.quiet["default"] / max(self.quiet.values())

    @property
    def share_of_quiet(self) -> float:
        return self.busy["default"] / self.quiet["default"]

    @property
    def share_of_fair(self) -> float:
        return self.busy["default"] / self.quiet[FAIR]

    @property
    def passed(self) -> bool:
        return self.share_of_fair >= MIN_FAIR_SHARE and self.quiet_loss <= MAX_QUIET_LOSS

    def as_dict(self) -> dict[str, Any]:
        names = ("quiet_loss", "share_of_quiet", "share_of_fair")
        return asdict(self) | {name: round(getattr(self, name), 3) for name in names}


def measure(tokens: int, rounds: int) -> BusyResult:
    cores = len(os.sched_getaffinity(0))
    with ExitStack() as stack:
        decoders: dict[str, Decoder] = {}
        for name, setting in settings(cores).items():
            decoders[name] = Decoder(setting, tokens)
            stack.callback(decoders[name].close)
        quiet = speeds(decoders, rounds)
        with busy_core():
            busy = speeds(decoders, rounds)
    return BusyResult(
        cores,
        {name: max(values) for name, values in quiet.items()},
        {name: statistics.median(values) for name, values in busy.items()},
    )


def speeds(decoders: dict[str, Decoder], rounds: int) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {name: [] for name in decoders}
    for _ in range(rounds):
        for name, decoder in decoders.items():
            values[name].append(decoder.measure())
    return values


def show(result: BusyResult) -> None:
    print(f"{result.cores} cores\n\n| setting | quiet, tokens/s | one core busy |\n|---|---|---|")
    for name in result.quiet:
        print(f"| {name} | {result.quiet[name]:.1f} | {result.busy[name]:.1f} |")
    print(
        f"\ndefault, one core busy: {result.share_of_quiet:.0%} of its quiet speed,"
        f" {result.share_of_fair:.0%} of the fair share (bar: {MIN_FAIR_SHARE:.0%});\n"
        f"quiet: {result.quiet_loss:.1%} below the best setting (bar: {MAX_QUIET_LOSS:.0%})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Decoding while another process takes a core.")
    parser.add_argument("--tokens", type=int, default=64, help="Per prompt; there are three.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        answer_requests(arguments.tokens)
        return
    result = measure(arguments.tokens, arguments.rounds)
    if arguments.json:
        print(json.dumps(result.as_dict(), indent=2))
    else:
        show(result)
    sys.exit(0 if result.passed else 1)


if __name__ == "__main__":
    main()
