"""Measure vLLM with a real target and an exported drafter, under the load of `peagle bench`.

    PYTHONPATH=.:VLLM python benchmarks/vllm/real_pair.py OUT.jsonl TARGET none:0,p-eagle:7 1:8,8:16
        --drafter EXPORTED --data bench/ [--sets humaneval,mt_bench] [--seconds 100]

TARGET and EXPORTED are folders: of a pulled target, and of `peagle export --to vllm`. A load 8:16
is 8 users with the first 16 tasks of a set. A user sends the turns of a task in order, with vLLM's
own answers before them; answers are greedy and end at the stop token or after `--tokens` tokens.
Every cell METHOD:K is a process: all of them load at the same time, and then they are measured one
after another. OUT gets a line per cell, load and set as soon as it is measured.

It runs on vLLM's CPU build as well: with `--kv-gib 1 --eager`, OMP_NUM_THREADS=1 and
VLLM_CPU_OMP_THREADS_BIND=0. VLLM_CPU_KVCACHE_SPACE, if it is set, replaces `--kv-gib` there.
"""

import argparse
import contextlib
import hashlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.vllm.quantized import acceptance, read_counters
from benchmarks.vllm.step import capture_sizes  # Sets vLLM's environment variables, too.
from peagle.bench.load.jobs import LoadJob, make_jobs, warmup_jobs
from peagle.data.bench import Task, read_sets

MAX_LENGTH = 2048  # tokens of a prompt and its answer
WARM_UP_TOKENS = 16
READY = "ready"


@dataclass(slots=True)
class User:
    """A user with one request under way."""

    job: LoadJob
    answers: list[str] = field(default_factory=list)  # to the turns before


class VllmLoad:
    """Users that send one request at a time to vLLM's engine, as `EngineLoad` does to ours."""

    def __init__(self, options: argparse.Namespace, max_users: int) -> None:
        from transformers import AutoTokenizer
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        self.tokenizer: Any = AutoTokenizer.from_pretrained(options.target, trust_remote_code=False)
        self.engine = load_llm(options, max_users).llm_engine
        self.drafts = options.one[0] != "none"
        stops = json.loads((options.target / "generation_config.json").read_text())["eos_token_id"]
        self.new_sampling = partial(
            SamplingParams,
            temperature=0.0,
            stop_token_ids=stops if isinstance(stops, list) else [stops],
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self.new_input = tokens_input
        self.first_turns: dict[str, list[int]] = {}  # token ids, by task
        self.sent = 0

    def measure(self, jobs: list[LoadJob], count: int) -> dict[str, Any]:
        """The speed of `count` users, and what was accepted of the drafts.

        First turns are encoded before the clock starts, as `EngineLoad` does.
        """
        self.first_turns = {job.task.id: self._encode(User(job)) for job in jobs}
        self.drive(warmup_jobs(jobs, count, WARM_UP_TOKENS), count)
        before = read_counters(self.engine)
        start = time.perf_counter()
        answers = self.drive(jobs, count)
        seconds = time.perf_counter() - start
        tokens = sum(map(len, answers.values()))
        record: dict[str, Any] = {
            "concurrency": count,
            "requests": len(answers),
            "tokens": tokens,
            "seconds": round(seconds, 3),
            "tokens_per_second": round(tokens / seconds, 1),
            "answers": {name: digest(ids) for name, ids in answers.items()},
        }
        return record | (acceptance(before, read_counters(self.engine)) if self.drafts else {})

    def drive(self, jobs: list[LoadJob], count: int) -> dict[str, list[int]]:
        """The token ids of every answer, by task and turn."""
        queue = iter(jobs)
        users = dict(self._send(User(job)) for _, job in zip(range(count), queue, strict=False))
        answers: dict[str, list[int]] = {}
        while users:
            for output in self.engine.step():
                if not output.finished:
                    continue
                user = users.pop(output.request_id)
                ids = list(output.outputs[0].token_ids)
                answers[f"{user.job.task.id}/{len(user.answers)}"] = ids
                users |= self._next(user, ids, queue)
        return answers

    def _next(self, user: User, ids: list[int], queue: Iterator[LoadJob]) -> dict[str, User]:
        """The request after an answer: the user's next turn, or another task."""
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        answers = [*user.answers, text]
        if len(answers) < len(user.job.task.turns):
            return dict([self._send(User(user.job, answers))])
        job = next(queue, None)
        return {} if job is None else dict([self._send(User(job))])

    def _send(self, user: User) -> tuple[str, User]:
        """Send the turn after the user's answers; returns the id of the request."""
        ids = self._encode(user) if user.answers else self.first_turns[user.job.task.id]
        name = str(self.sent)
        self.sent += 1
        sampling = self.new_sampling(max_tokens=user.job.max_tokens)
        self.engine.add_request(name, self.new_input(ids), sampling)
        return name, user

    def _encode(self, user: User) -> list[int]:
        """The token ids of the turn after the user's answers."""
        messages = user.job.messages(user.answers)
        # transformers 4 returns a plain list without `return_dict`.
        encoded = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True
        )
        ids: list[int] = encoded["input_ids"]
        return ids


def load_llm(options: argparse.Namespace, max_users: int) -> Any:
    from vllm import LLM

    method, k = options.one[0], int(options.one[1])
    extra: dict[str, Any] = {}
    if method != "none":
        extra["speculative_config"] = {
            "method": "eagle3",
            "model": str(options.drafter),
            "num_speculative_tokens": k,
            "parallel_drafting": method == "p-eagle",
        }
    return LLM(
        model=str(options.target),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=MAX_LENGTH,
        max_num_seqs=max_users,
        gpu_memory_utilization=0.1,  # That much must be free; kv_cache_memory_bytes decides.
        kv_cache_memory_bytes=int(options.kv_gib * (1 << 30)),
        enable_prefix_caching=False,
        enforce_eager=options.eager,
        compilation_config={"cudagraph_capture_sizes": capture_sizes(max_users, k)},
        disable_log_stats=False,
        seed=0,
        **extra,
    )


def digest(ids: list[int]) -> str:
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:8]


def read_jobs(options: argparse.Namespace, limit: int) -> dict[str, list[LoadJob]]:
    sets: dict[str, list[Task]] = read_sets(options.sets.split(","), options.data, limit)
    return {name: make_jobs(tasks, options.tokens, 0) for name, tasks in sets.items()}


def measure_cell(options: argparse.Namespace) -> None:
    """Load a cell in this process, wait for a line on stdin, and print a record per measurement."""
    loads = [[int(number) for number in word.split(":")] for word in options.loads.split(",")]
    sets = read_jobs(options, max(tasks for _, tasks in loads))
    load = VllmLoad(options, max(users for users, _ in loads))
    print(READY, flush=True)
    sys.stdin.readline()
    method, k = options.one
    for users, tasks in loads:
        for name, jobs in sets.items():
            cell = {"method": method, "k": int(k), "set": name}
            print(json.dumps(cell | load.measure(jobs[:tasks], users)), flush=True)


def run_cells(options: argparse.Namespace) -> int:
    """Run every cell in a process of its own; 1 if one of them failed or was late."""
    workers = [start_worker(cell) for cell in options.cells.split(",")]
    timer = threading.Timer(options.seconds, stop_workers, [workers])
    timer.start()
    try:
        for worker in [worker for worker in workers if wait_until_ready(worker)]:
            for line in measured_lines(worker):
                with options.out.open("a") as file:
                    file.write(line)
                print(summary(json.loads(line)), flush=True)
        return int(any(worker.wait() != 0 for worker in workers))
    finally:
        timer.cancel()
        stop_workers(workers)


def start_worker(cell: str) -> "subprocess.Popen[str]":
    command = [sys.executable, __file__, *sys.argv[1:], "--one", *cell.split(":")]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def wait_until_ready(worker: "subprocess.Popen[str]") -> bool:
    """Whether the process has loaded its models; False when it has ended."""
    assert worker.stdout is not None
    return any(line.strip() == READY for line in worker.stdout)


def measured_lines(worker: "subprocess.Popen[str]") -> Iterator[str]:
    """Let a process measure; other lines that it prints are ignored."""
    assert worker.stdin is not None and worker.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # It has been stopped.
        worker.stdin.write("go\n")
        worker.stdin.flush()
    return (line for line in worker.stdout if line.startswith('{"method"'))


def stop_workers(workers: "list[subprocess.Popen[str]]") -> None:
    for worker in workers:
        worker.kill()


def summary(record: dict[str, Any]) -> str:
    return json.dumps({name: value for name, value in record.items() if name != "answers"})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure vLLM with a real target and drafter.")
    parser.add_argument("out", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("cells", help="METHOD:K,METHOD:K; none has K 0")
    parser.add_argument("loads", help="USERS:TASKS,USERS:TASKS")
    parser.add_argument("--drafter", type=Path)
    parser.add_argument("--data", type=Path, help="folder of the sets")
    parser.add_argument("--sets", default="humaneval,mt_bench")
    parser.add_argument("--tokens", type=int, default=256, help="of the longest answer")
    parser.add_argument("--kv-gib", type=float, default=8.0, help="KV cache")
    parser.add_argument("--seconds", type=float, default=100.0, help="limit on all of it")
    parser.add_argument("--eager", action="store_true", help="no torch.compile, no CUDA graphs")
    parser.add_argument("--one", nargs=2, metavar=("METHOD", "K"), help="measure in this process")
    options = parser.parse_args()
    if options.drafter is None and any(not c.startswith("none") for c in options.cells.split(",")):
        parser.error("a cell that drafts needs --drafter")
    return options


def main(options: argparse.Namespace) -> int:
    if not options.one:
        return run_cells(options)
    measure_cell(options)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(parse_arguments()))
