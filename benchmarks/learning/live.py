"""A live server on a CPU learns from light traffic: an answer, a pause, the next answer.

    python -m benchmarks.learning.live OUT --replay FOLDER [--minutes 18]
        [--domain json] [--pause 4]

Every prompt is new when it is asked, so that its acceptance length is that of prompts which the
drafter has not seen. A stopped job must not slow answers: the seconds of a decode step do not
depend on acceptance; they are compared before the first round and during a round.
FOLDER has answers of `peagle regenerate`, which are replayed. Rows are printed and added to
OUT/answers.jsonl; the table comes last.
"""

import argparse
import json
import statistics
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.learning.domains import DOMAINS, domain_prompts
from benchmarks.server.process import ServerProcess, serving
from peagle.learn.folder import LearnFolder
from peagle.learn.status import read_status
from peagle.learn.versions import list_versions, read_current

ROUND_SETTINGS = {"min_documents": 32, "min_held_back": 6}
MAX_TOKENS = 128
K = 7
Row = dict[str, Any]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--replay", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=18.0)
    parser.add_argument("--domain", choices=DOMAINS, default="json")
    parser.add_argument("--pause", type=float, default=4.0)
    parser.add_argument("--pair", default="smollm2-135m")
    return parser.parse_args()


def ask(server: ServerProcess, prompt: str) -> Row:
    """One answer: tokens, decode steps and seconds."""
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
    }
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    started = time.perf_counter()
    with urllib.request.urlopen(request, timeout=600) as reply:
        answer = json.loads(reply.read())
    seconds = time.perf_counter() - started
    drafting = answer["metrics"]["speculative_decoding"]
    return {
        "seconds": round(seconds, 4),
        "tokens": answer["usage"]["completion_tokens"],
        "steps": drafting["num_spec_steps"],
        "accepted": drafting["num_accepted_draft_tokens"],
    }


def run(options: argparse.Namespace) -> list[Row]:
    folder = LearnFolder(options.out / "learned")
    folder.root.mkdir(parents=True, exist_ok=True)
    (folder.root / "training.json").write_text(json.dumps(ROUND_SETTINGS))
    learn = ["--learn", str(folder.root), "--learn-replay", str(options.replay)]
    drafting = ["--method", "p-eagle", "-k", str(K), "--no-ngram"]
    arguments = [options.pair, "--device", "cpu", "--context", "1024", *drafting, *learn]
    rows: list[Row] = []
    with serving(arguments, log=options.out / "server.log") as server:
        end = time.monotonic() + 60 * options.minutes
        for prompt in domain_prompts(options.domain, 400):
            if time.monotonic() > end:
                break
            busy = read_status(folder).state in ("training", "judging", "paused")
            version = read_current(folder).number
            row = ask(server, prompt) | {"version": version, "during_round": busy}
            rows.append(row)
            print(json.dumps(row), flush=True)
            with (options.out / "answers.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            time.sleep(options.pause)
    for record in list_versions(folder):
        print(record)
    return rows


def print_group(name: str, rows: list[Row]) -> None:
    group = [row for row in rows if row["steps"]]
    if not group:
        return
    steps = sum(row["steps"] for row in group)
    length = 1 + sum(row["accepted"] for row in group) / steps
    step_ms = 1000 * statistics.median(row["seconds"] / row["steps"] for row in group)
    token_ms = 1000 * statistics.median(row["seconds"] / row["tokens"] for row in group)
    print(
        f"{name:32} {len(group):4} answers, acceptance length {length:.3f},"
        f" p50 of a step {step_ms:.2f} ms, of a token {token_ms:.2f} ms"
    )


def main() -> None:
    options = parse_arguments()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = run(options)
    first = next((i for i, row in enumerate(rows) if row["during_round"]), len(rows))
    later = rows[first:]
    print_group("version 0, before any round", rows[:first])
    for version in sorted({row["version"] for row in later}):
        print_group(f"version {version}", [row for row in later if row["version"] == version])
    print_group("all, during a round", [row for row in later if row["during_round"]])
    print_group("all, between rounds", [row for row in later if not row["during_round"]])


if __name__ == "__main__":
    main()
