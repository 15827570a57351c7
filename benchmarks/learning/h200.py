"""The bars of learning on a GPU: a server learns four domains that its drafter has not seen.

    python -m benchmarks.learning.h200 OUT --data FOLDER --parts prepare,baseline,learn,report
        [--seconds 560] [--learn-time 0.1] [--streams 64] [--prompts 400] [--pair smollm2-135m]

Parts, in this order; OUT keeps their files, so that they may run in several commands:

    prepare    the target answers 80 held-out prompts of each domain, prompts of the old sets in
               FOLDER (humaneval, gsm8k), and other prompts of these sets, which are replayed
    baseline   `peagle serve` without learning: waves of the other prompts of all domains
    learn      `peagle serve --learn`: the same waves, until the time is over; again in another
               command, it goes on with what it has learned
    report     acceptance lengths at K=7 of versions 0 and current on the held-out prompts of each
               domain and on the old sets; tokens/s; requests lost

`--seconds` limits the whole command; report needs about 60 of them. Every row is printed and added
to OUT/rows.jsonl at once. The machine needs the packages of `peagle[serve]` (see server/h200.py).
"""

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.learning.answers import answered, count_drafter
from benchmarks.learning.domains import DOMAINS, domain_prompts
from benchmarks.server.process import ServerProcess, serving
from benchmarks.server.stream_load import LoadResult, drive
from peagle.data.bench import Task, read_sets
from peagle.learn.folder import LearnFolder
from peagle.learn.settings import LearnerSettings
from peagle.learn.status import read_status
from peagle.learn.training.judge import compare
from peagle.learn.training.teacher import Teacher, load_teacher
from peagle.learn.versions import list_versions, read_current
from peagle.train.data.documents import Documents

PARTS = ("prepare", "baseline", "learn", "report")
OLD_SETS = ("humaneval", "gsm8k")
BASELINE_WAVES = 6
WARM_UP_WAVES = 2  # one greedy, one sampled
DOMAIN_BAR, OLD_BAR, SPEED_BAR = 1.2, 0.98, 0.95
K = 7


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--seconds", type=float, default=560.0)
    parser.add_argument("--pair", default="smollm2-135m")
    parser.add_argument("--drafter")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--learn-time", type=float, default=0.1)
    parser.add_argument("--learn-memory", type=float, default=16.0)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=400, help="of each domain")
    parser.add_argument("--held-out", type=int, default=80, help="of each domain")
    parser.add_argument("--old-prompts", type=int, default=40, help="of each old set, to judge")
    parser.add_argument(
        "--replay-prompts", type=int, default=480, help="of each old set, if it has them"
    )
    parser.add_argument("--max-tokens", type=int, default=192)
    return parser.parse_args()


class LearnBars:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.out: Path = options.out
        self.out.mkdir(parents=True, exist_ok=True)
        self.folder = LearnFolder(self.out / "learned")
        self.deadline = time.monotonic() + options.seconds

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def add(self, **row: Any) -> None:
        print(json.dumps(row), flush=True)
        with (self.out / "rows.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    def rows(self, part: str) -> list[dict[str, Any]]:
        path = self.out / "rows.jsonl"
        lines = path.read_text().splitlines() if path.is_file() else []
        return [row for row in map(json.loads, lines) if row.get("part") == part]

    # Answers.

    def teacher(self) -> Teacher:
        options = self.options
        return load_teacher(
            LearnerSettings(options.pair, drafter=options.drafter, device=options.device)
        )

    def held_out_tasks(self) -> dict[str, list[Task]]:
        """The held-out prompts by domain, and those of the old sets."""
        options = self.options
        tasks = {}
        for domain in DOMAINS:
            prompts = domain_prompts(domain, options.prompts)[: options.held_out]
            tasks[domain] = [Task(f"{domain}{i}", (text,)) for i, text in enumerate(prompts)]
        for name, found in read_sets(list(OLD_SETS), options.data).items():
            tasks[name] = found[: options.old_prompts]
        return tasks

    def answers(self, teacher: Teacher) -> dict[str, Documents]:
        limit = self.options.max_tokens
        return {
            name: answered(self.out / f"{name}.jsonl", teacher.target, tasks, limit)
            for name, tasks in self.held_out_tasks().items()
        }

    def prepare(self) -> None:
        options = self.options
        started = time.monotonic()
        teacher = self.teacher()
        self.answers(teacher)
        first, count = options.old_prompts, options.replay_prompts
        sets = read_sets(list(OLD_SETS), options.data).values()
        replayed = [task for found in sets for task in found[first : first + count]]
        path = self.out / "replay" / "answers.jsonl"
        answered(path, teacher.target, replayed, options.max_tokens)
        self.add(part="prepare", seconds=round(time.monotonic() - started, 1))

    # Serving.

    def server_options(self) -> list[str]:
        options = self.options
        drafter = ["--drafter", options.drafter] if options.drafter else []
        return [options.pair, *drafter, "--method", "p-eagle", "-k", str(K)]

    def bodies(self, wave: int) -> list[dict[str, Any]]:
        """All prompts of the traffic, in an order and with seeds of the wave."""
        options = self.options
        prompts = [
            prompt
            for domain in DOMAINS
            for prompt in domain_prompts(domain, options.prompts)[options.held_out :]
        ]
        random.Random(wave).shuffle(prompts)
        return [
            {
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": options.max_tokens,
                "temperature": 0.0 if wave % 2 == 0 else 0.7,
                "seed": wave,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            for prompt in prompts
        ]

    def run_wave(self, server: ServerProcess, part: str, wave: int) -> LoadResult:
        options = self.options
        version = self.version(part)
        result = drive(server.url, self.bodies(wave), options.streams, options.clients)
        firsts = sum(result.first_token_seconds)
        self.add(
            part=part,
            wave=wave,
            version=version,
            version_after=self.version(part),
            tokens_per_second=round(result.tokens_per_second, 1),
            answers=result.answers,
            tokens=result.tokens,
            lost=len(self.bodies(wave)) - result.answers,
            errors=dict(result.errors),
            tpot_ms=round(1000 * (sum(result.answer_seconds) - firsts) / max(result.tokens, 1), 4),
            first_token_p99_ms=round(result.first_token_ms(0.99), 1),
            seconds=round(result.end - result.start, 1),
            **self.trainer_state(part),
        )
        return result

    def version(self, part: str) -> int:
        return read_current(self.folder).number if part == "learn" else 0

    def trainer_state(self, part: str) -> dict[str, Any]:
        if part != "learn":
            return {}
        status = read_status(self.folder)
        return {
            "trainer": status.state,
            "step": status.step,
            "versions": [(r.number, r.state, r.mixed) for r in list_versions(self.folder)],
            "error": status.error,
        }

    def baseline(self) -> None:
        with serving(self.server_options(), log=self.out / "baseline.log") as server:
            server.wait_for_graphs()
            for wave in range(BASELINE_WAVES):
                self.run_wave(server, "baseline", wave)

    def learn(self) -> None:
        options = self.options
        reserve = 75.0 if "report" in options.parts else 10.0
        learning = ["--learn", str(self.folder.root), "--learn-time", str(options.learn_time)]
        learning += ["--learn-memory", str(options.learn_memory)]
        learning += ["--learn-replay", str(self.out / "replay")]
        wave = len(self.rows("learn"))
        with serving(
            [*self.server_options(), *learning], log=self.out / f"learn-{wave}.log"
        ) as server:
            server.wait_for_graphs()
            longest = 0.0
            while self.left() > reserve + longest:
                result = self.run_wave(server, "learn", wave)
                longest = max(longest, result.end - result.start + 1.0)
                wave += 1

    # The table.

    def report(self) -> None:
        teacher = self.teacher()
        number = read_current(self.folder).number
        for name, documents in self.answers(teacher).items():
            before = count_drafter(teacher.drafter, teacher.target, documents)
            after = count_drafter(teacher.version(self.folder, number), teacher.target, documents)
            row = compare(before, after, K)
            bar = DOMAIN_BAR if name in DOMAINS else OLD_BAR
            self.add(
                part="report",
                set=name,
                version=number,
                answers=row.documents,
                before=row.before,
                after=row.after,
                ratio=round(row.ratio, 3),
                low=row.low,
                high=row.high,
                bar=bar,
                reached=row.ratio >= bar,
            )
        self.print_table()

    def print_table(self) -> None:
        print(f"\n{'set':<12}{'before':>8}{'after':>8}{'ratio':>8}{'bar':>6}")
        newest = {row["set"]: row for row in self.rows("report")}
        for row in newest.values():
            print(
                f"{row['set']:<12}{row['before']:>8.3f}{row['after']:>8.3f}"
                f"{row['ratio']:>8.3f}{row['bar']:>6}"
            )
        waves = self.rows("learn")
        baseline = self.rows("baseline")[WARM_UP_WAVES:]
        learning = [row for row in waves if row["version"] == row["version_after"] == 0]
        learning = learning[WARM_UP_WAVES:]
        print(f"tokens/s without learning, greedy and sampled: {speeds(baseline)}")
        for name, rows in (
            ("version 0, learning", learning),
            ("all waves", waves[WARM_UP_WAVES:]),
            ("the last waves", waves[-4:]),
        ):
            print(f"tokens/s, {name}: {speeds(rows)}, {speed_ratio(rows, baseline):.3f} x")
        print(f"bar {SPEED_BAR} x; requests lost {sum(row['lost'] for row in waves)}")


def speeds(rows: list[dict[str, Any]]) -> dict[int, float]:
    """The median speed of greedy (0) and sampled (1) waves."""
    return {
        kind: statistics.median(row["tokens_per_second"] for row in rows if row["wave"] % 2 == kind)
        for kind in (0, 1)
        if any(row["wave"] % 2 == kind for row in rows)
    }


def speed_ratio(rows: list[dict[str, Any]], baseline: list[dict[str, Any]]) -> float:
    """The mean ratio of speeds, over the kinds of waves that both have; 0: there is none."""
    ours, theirs = speeds(rows), speeds(baseline)
    ratios = [ours[kind] / theirs[kind] for kind in ours.keys() & theirs.keys()]
    return statistics.mean(ratios) if ratios else 0.0


def main() -> None:
    bars = LearnBars(parse_arguments())
    for part in bars.options.parts.split(","):
        if part not in PARTS:
            raise SystemExit(f"unknown part {part!r}: use {', '.join(PARTS)}")
        getattr(bars, part)()


if __name__ == "__main__":
    main()
