"""Compare peagle with llama.cpp on this CPU: the same GGUF file, threads, prompts and tokens.

    python -m benchmarks.llamacpp DATA LLAMA_PYTHON [--gguf FILE] [--auto] [--out FILE]

DATA is the folder with humaneval.jsonl, LLAMA_PYTHON the interpreter that has llama-cpp-python.
Both run the weights as the file stores them; with --auto, peagle runs what `peagle demo` does.
Each engine stays loaded in a process of its own, and they measure in turns: every round has every
case once. The ratio of the best rounds counts; the ratio of the medians is printed beside it.
All answers are greedy and have the same number of tokens: prompts with shorter answers are skipped.
"""

import argparse
import os
from pathlib import Path

from benchmarks.llamacpp.bandwidth import ReadLoop
from benchmarks.llamacpp.cases import CASES, PARALLEL, PREFILL_TOKENS, Case, Speeds
from benchmarks.llamacpp.report import build_record, print_report
from benchmarks.llamacpp.worker import Worker, llama_worker, peagle_worker
from peagle.catalog import DEFAULT_PAIR, find_pair
from peagle.data.bench import Task, read_sets
from peagle.machine import available_cores
from peagle.paths import write_json
from peagle.pull.pull import target_folder

RECORD = Path(__file__).parents[2] / "docs" / "results" / "llamacpp" / "llamacpp.json"
CONTEXT = 1024  # tokens of a prompt and its answer
PROMPTS_PER_ROUND = 3  # one request at a time
CANDIDATES = 64  # prompts of the set to choose from


class Comparison:
    """The three processes: peagle, and llama.cpp with a context for one and for four requests."""

    def __init__(self, options: argparse.Namespace) -> None:
        threads = options.threads
        self.max_tokens: int = options.tokens
        gguf = None if options.auto else options.gguf
        self.peagle = peagle_worker(options.pair, gguf, options.dtype, threads, CONTEXT)
        python = options.llama_python
        self.llama = {
            count: llama_worker(python, options.gguf, threads, CONTEXT, count)
            for count in (1, PARALLEL)
        }
        texts = [task.turns[0] for task in self.read_tasks(options.data)]
        encoded = self.peagle.ask("encode", texts=texts)["prompts"]
        self.prompts = self.long_answers(encoded, max(PARALLEL, PROMPTS_PER_ROUND))
        self.long_prompt = [token for ids in encoded for token in ids][:PREFILL_TOKENS]
        self.skipped: dict[str, str] = {}  # case -> reason

    @staticmethod
    def read_tasks(data: Path) -> list[Task]:
        return read_sets(["humaneval"], data, CANDIDATES)["humaneval"]

    def long_answers(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        """The first prompts whose answers do not end early."""
        chosen: list[list[int]] = []
        for ids in prompts:
            if len(ids) + self.max_tokens > CONTEXT:
                continue
            fields = {"method": "none", "int8": False, "ignore_eos": False}
            reply = self.peagle.ask("decode", prompts=[ids], max_tokens=self.max_tokens, **fields)
            if len(reply["answers"][0]) == self.max_tokens:
                chosen.append(ids)
            if len(chosen) == count:
                return chosen
        raise SystemExit(
            f"fewer than {count} answers have {self.max_tokens} tokens: lower --tokens"
        )

    def measure(self, case: Case) -> float | None:
        """Tokens per second of one round; None: not supported here."""
        requests = case.requests
        worker: Worker = self.llama[requests] if case.engine == "llama.cpp" else self.peagle
        fields = {} if case.engine == "llama.cpp" else {"method": case.method, "int8": case.int8}
        if case.kind == "prefill":
            replies = [worker.ask("prefill", ids=self.long_prompt, **fields)]
        else:
            groups = (
                [[ids] for ids in self.prompts[:PROMPTS_PER_ROUND]]
                if requests == 1
                else [self.prompts[:requests]]
            )
            replies = [
                worker.ask("decode", prompts=group, max_tokens=self.max_tokens, **fields)
                for group in groups
            ]
        if error := next((reply["error"] for reply in replies if "error" in reply), None):
            self.skipped[case.name] = error
            return None
        if case.kind == "prefill":
            return len(self.long_prompt) / replies[0]["prefill_seconds"]
        seconds = sum(reply["decode_seconds"] for reply in replies)
        return sum(reply["decoded_tokens"] for reply in replies) / seconds

    def close(self) -> None:
        for worker in (self.peagle, *self.llama.values()):
            worker.close()


def run_rounds(comparison: Comparison, read_loop: ReadLoop, rounds: int) -> dict[str, Speeds]:
    """Each case and the read loop once per round, after a round that warms up."""
    speeds: dict[str, Speeds] = {case.name: Speeds([]) for case in CASES}
    for round_number in range(rounds + 1):
        read_loop.measure()
        for case in CASES:
            if case.name in comparison.skipped:
                continue
            speed = comparison.measure(case)
            if speed is not None and round_number:
                speeds[case.name].values.append(round(speed, 2))
    return {name: measured for name, measured in speeds.items() if measured.values}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare peagle with llama.cpp on this CPU.")
    parser.add_argument("data", type=Path)
    parser.add_argument("llama_python")
    parser.add_argument("--pair", default=DEFAULT_PAIR)
    parser.add_argument("--gguf", type=Path, help="default: model.gguf of the pulled target")
    parser.add_argument(
        "--auto", action="store_true", help="peagle chooses the weights, not always the GGUF file's"
    )
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--tokens", type=int, default=96, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RECORD)
    options = parser.parse_args()
    folder = target_folder(find_pair(options.pair))
    options.gguf = (options.gguf or folder / "model.gguf").resolve()
    if not options.gguf.is_file():
        parser.error(f"no GGUF file at {options.gguf}: run `peagle pull`, or use --gguf")
    options.data = options.data.resolve()
    return options


def main() -> None:
    options = parse_options()
    # Both get the same number of threads, also from runtimes that read it at their start.
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    read_loop = ReadLoop(options.threads)
    comparison = Comparison(options)
    try:
        speeds = run_rounds(comparison, read_loop, options.rounds)
        record = build_record(comparison, options, speeds, read_loop.best)
    finally:
        comparison.close()
    print_report(record)
    write_json(options.out, record)
    print(f"\nrecord: {options.out}")


if __name__ == "__main__":
    main()
