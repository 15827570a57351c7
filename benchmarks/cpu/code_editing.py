"""P-EAGLE with and without n-gram drafts, or ngram beside none, on edits of code.

    OMP_NUM_THREADS=1 python -m benchmarks.cpu.code_editing --data ../shared/data/bench

Each task of the set is the test function of a humaneval problem, to be repeated with one change.
Answers are greedy, with up to 256 tokens. The settings take turns on every task; the speed of a
task is the median of its rounds, and a ratio is that of the sums over all tasks. `--set humaneval`
and `--set mt_bench` measure ordinary prompts.

On a machine that others use too, `--cpu-time` measures the time that this process computed, in
place of the time that passed: with one thread the two are equal on an idle machine. Adaptive
drafting then measures steps in the same way.
"""

import argparse
import json
import re
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peagle.engine.loop
import peagle.loaded
from peagle.core import Generation
from peagle.kernels.cpu.library import kernel_state
from peagle.loaded import LoadedPair, load

CHANGES = (
    'add the line `print("done")` at its end',
    "rename it to `test_all`",
    'add the docstring """Test some examples.""" to it',
)
TASKS = 30
MAX_PROMPT_LINES = 12


@dataclass
class Setting:
    name: str
    method: str
    ngram: bool | None
    seconds: list[float] = field(default_factory=list)  # median per task, decoding only
    tokens: int = 0
    steps: int = 0
    drafts: int = 0
    accepted: int = 0
    answers: list[list[int]] = field(default_factory=list)

    def add(self, rounds: list[Generation]) -> None:
        last = rounds[-1]
        self.seconds.append(
            statistics.median(each.seconds - each.prefill_seconds for each in rounds)
        )
        self.tokens += len(last.token_ids) - 1  # The prefill gives the first one.
        self.steps += len(last.steps) - 1
        self.drafts += sum(step.drafted > 0 for step in last.steps)
        self.accepted += sum(step.accepted for step in last.steps)
        self.answers.append(last.token_ids)

    @property
    def rate(self) -> float:
        return self.tokens / sum(self.seconds)


class CpuTime:
    """Stands in for the module `time` where steps and answers are timed."""

    perf_counter = staticmethod(time.process_time)


def editing_prompts(path: Path) -> list[str]:
    """Ask for the test function of each problem again, with one of three changes."""
    prompts: list[str] = []
    for line in path.read_text().splitlines():
        problem = json.loads(line)
        found = re.search(r"def check\(candidate\):.*", problem["test"], re.DOTALL)
        if found is None:
            continue
        name = problem["entry_point"]
        code = re.sub(r"\n\s*\n", "\n", found[0]).rstrip()
        code = code.replace("check(candidate)", f"test_{name}()", 1).replace("candidate", name)
        if len(code.splitlines()) > MAX_PROMPT_LINES or '"""' in code:
            continue
        change = CHANGES[len(prompts) % len(CHANGES)]
        prompts.append(f"Repeat this function with one change: {change}.\n```python\n{code}\n```")
    return prompts


def set_prompts(data: Path, name: str) -> list[str]:
    if name == "code_editing":
        return editing_prompts(data / "humaneval.jsonl")
    lines = (data / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line)["turns"][0] for line in lines]


def measure(
    pair: LoadedPair, prompts: list[str], settings: list[Setting], rounds: int, max_tokens: int
) -> None:
    def answer(prompt: str, setting: Setting) -> Generation:
        return pair.generate(
            prompt, method=setting.method, ngram=setting.ngram, max_tokens=max_tokens
        )

    for setting in settings:
        answer("Count to twenty in words.", setting)  # Costs of steps are measured first.
    for number, prompt in enumerate(prompts):
        answers: list[list[Generation]] = [[] for _ in settings]
        for turn in range(rounds):
            order = list(range(len(settings)))[:: -1 if (number + turn) % 2 else 1]
            for i in order:
                answers[i].append(answer(prompt, settings[i]))
        for setting, each in zip(settings, answers, strict=True):
            setting.add(each)
        ratio = settings[0].seconds[-1] / settings[1].seconds[-1]
        lengths = " ".join(f"{a[-1].acceptance_length:.2f}" for a in answers)
        print(f"task {number}: {len(answers[0][0].token_ids)} tokens, AL {lengths}, {ratio:.2f} x")


def report(settings: list[Setting], options: argparse.Namespace) -> None:
    base, other = settings
    for setting in settings:
        length = 1 + setting.accepted / max(setting.drafts, 1)
        print(
            f"{setting.name}: {setting.rate:.1f} tokens/s, acceptance length {length:.2f},"
            f" {setting.tokens} tokens in {setting.steps} steps"
        )
    ratios = [a / b for a, b in zip(base.seconds, other.seconds, strict=True)]
    same = sum(a == b for a, b in zip(base.answers, other.answers, strict=True))
    print(
        f"{options.set}, {options.pair}, {kernel_state()}: {other.rate / base.rate:.2f} x,"
        f" median of the tasks {statistics.median(ratios):.2f} x,"
        f" {same} of {len(ratios)} answers identical"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.cpu.code_editing", description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data/bench"))
    parser.add_argument("--set", default="code_editing")
    parser.add_argument("--pair", default="smollm2-135m")
    parser.add_argument("--tasks", type=int, default=TASKS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--without-drafter", action="store_true", help="ngram beside none")
    parser.add_argument("--cpu-time", action="store_true")
    options = parser.parse_args()
    if options.cpu_time:
        clock: Any = CpuTime
        peagle.engine.loop.time = peagle.loaded.time = clock
    settings = [Setting("p-eagle", "p-eagle", False), Setting("with n-grams", "p-eagle", True)]
    if options.without_drafter:
        settings = [Setting("none", "none", None), Setting("ngram", "ngram", None)]
    pair = load(options.pair)
    prompts = set_prompts(options.data, options.set)[: options.tasks]
    measure(pair, prompts, settings, options.rounds, options.max_tokens)
    report(settings, options)


if __name__ == "__main__":
    main()
