"""A drafter learns a domain that it has not seen, on a CPU: the real pair, without a server.

    python -m benchmarks.learning.cpu OUT --data FOLDER [--domain json] [--prompts 160] [--rounds 2]

The target answers prompts of the domain (domains.py) and of old sets in FOLDER (humaneval.jsonl and
gsm8k.jsonl), greedily. The answers of the domain arrive in the store of a learn folder in as many
parts as there are rounds; every fifth prompt is held back. Other prompts of the old sets are
replayed. Reported are the acceptance lengths of every version at K=7, on the held-back answers of
the domain and on old prompts that nothing was trained on, with intervals over documents. Answers
are kept in OUT: a second run uses them, and a killed run resumes its round. It prints the processor
time of the rounds, too, and how much of it the target needs to compute features again, which would
be saved if they were kept from the verify pass.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.learning.answers import K, answered, count_drafter, stored
from benchmarks.learning.domains import DOMAINS, domain_prompts
from peagle.data.bench import Task, read_sets
from peagle.learn.document import is_held_back
from peagle.learn.figure import draw_versions
from peagle.learn.folder import LearnFolder
from peagle.learn.segment import SegmentFile, StoreLimits
from peagle.learn.settings import LearnerSettings
from peagle.learn.store import encode_line
from peagle.learn.store_reader import list_segments
from peagle.learn.train_job import TrainJob
from peagle.learn.training.judge import AcceptedCounts, compare
from peagle.learn.versions import LengthComparison, list_versions, read_current
from peagle.paths import write_text
from peagle.train.data.documents import Documents, join_documents
from peagle.train.data.pack import Batch
from peagle.train.features.features import FeatureExtractor
from peagle.train.features.teacher import PackFeatures

OLD_SETS = ("humaneval", "gsm8k")
ROUND_SETTINGS = {"min_documents": 20, "min_held_back": 10}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--domain", choices=DOMAINS, default="json")
    parser.add_argument("--pair", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, default=160)
    parser.add_argument("--old-prompts", type=int, default=12, help="of each old set, to judge")
    parser.add_argument("--replay-prompts", type=int, default=60, help="of each old set, to replay")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=128)
    return parser.parse_args()


class TimedFeatures:
    """Measures the processor time and the tokens of all calls of FeatureExtractor."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.tokens = 0
        compute = FeatureExtractor.__call__

        def call(source: FeatureExtractor, batch: Batch) -> PackFeatures:
            started = time.process_time()
            features = compute(source, batch)
            self.seconds += time.process_time() - started
            self.tokens += len(batch.ids)
            return features

        FeatureExtractor.__call__ = call  # type: ignore[method-assign, assignment]


class LearnRun:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.out: Path = options.out
        self.folder = LearnFolder(self.out / "learned")
        self.folder.root.mkdir(parents=True, exist_ok=True)
        write_text(self.folder.root / "training.json", json.dumps(ROUND_SETTINGS))
        replay = str(self.out / "replay")
        self.job = TrainJob(self.folder, LearnerSettings(options.pair, device="cpu", replay=replay))
        self.job.on_step = lambda step, total, loss: print(
            f"step {step} of {total}: loss {loss:.3f}, {time.process_time():.0f} CPU seconds",
            flush=True,
        )
        self.target = self.job.teacher.target
        self.read_answers()
        self.features = TimedFeatures()

    def read_answers(self) -> None:
        options = self.options
        prompts = domain_prompts(options.domain, options.prompts)
        tasks = [Task(f"{options.domain}{i}", (prompt,)) for i, prompt in enumerate(prompts)]
        self.domain = self._answer(f"{options.domain}.jsonl", tasks)
        sets = read_sets(list(OLD_SETS), options.data)
        old, replayed = options.old_prompts, options.replay_prompts
        self.old = self._answer("old.jsonl", [t for s in sets.values() for t in s[:old]])
        chosen = [task for s in sets.values() for task in s[old : old + replayed]]
        self._answer("replay/answers.jsonl", chosen)

    def _answer(self, name: str, tasks: list[Task]) -> Documents:
        documents = answered(self.out / name, self.target, tasks, self.options.max_tokens)
        seconds = time.process_time()
        print(f"{name}: {len(documents)} answers, {seconds:.0f} CPU seconds", flush=True)
        return documents

    def run(self) -> None:
        """Store a part of the answers, run a round, and so on."""
        documents = stored(self.domain)
        rounds = self.options.rounds
        done = len(list_segments(self.folder))
        started = time.process_time()
        if self.job.rounds.plan() is not None:
            self.job.run()
        for part in range(done, rounds):
            segment = SegmentFile(self.folder, f"part{part}", StoreLimits())
            for document in documents[part::rounds]:
                segment.append(encode_line(replace(document, time=time.time())))
            segment.close()
            for record in self.job.run():
                print(f"version {record.number} {record.state}: {record.reason}", flush=True)
        seconds = time.process_time() - started
        print(
            f"rounds: {seconds:.0f} CPU seconds, {self.features.seconds:.0f} of them for"
            f" features of {self.features.tokens:,} tokens",
            flush=True,
        )

    def report(self) -> None:
        held_back = [i for i, d in enumerate(stored(self.domain)) if is_held_back(d.id)]
        judged = {
            self.options.domain: join_documents([self.domain[i] for i in held_back]),
            "old sets": self.old,
        }
        lengths = {
            name: self.compare_versions(name, documents) for name, documents in judged.items()
        }
        write_text(self.out / "lengths.json", json.dumps(lengths, indent=1))
        draw_versions(list_versions(self.folder), self.out / "versions.png")
        for record in list_versions(self.folder):
            print(
                f"version {record.number}: {record.state}, {record.documents} documents,"
                f" {record.steps} steps, {record.seconds:.0f} s, share {record.mixed}"
            )
        print(f"{time.process_time():.0f} CPU seconds in this run")

    def compare_versions(self, name: str, documents: Documents) -> list[dict[str, float]]:
        """Compare every version that was current with that of the pair."""
        number = read_current(self.folder).number
        before = self.count(0, documents)
        rows = []
        for version in sorted({0, number}):
            after = before if version == 0 else self.count(version, documents)
            row: LengthComparison = compare(before, after, K)
            rows.append({"version": version, "length": row.after, "ratio": row.ratio})
            print(
                f"{name}: version {version}: {row.after:.3f} over {row.documents} answers,"
                f" {row.ratio:.3f} x ({row.low:.3f} to {row.high:.3f})",
                flush=True,
            )
        return rows

    def count(self, version: int, documents: Documents) -> AcceptedCounts:
        folder = self.job.teacher.version(self.folder, version)
        return count_drafter(folder, self.target, documents)


def main() -> None:
    run = LearnRun(parse_arguments())
    run.run()
    run.report()


if __name__ == "__main__":
    main()
