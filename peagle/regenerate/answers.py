"""AnswerFile: a folder with answers.jsonl, which grows, and regenerate.json with its settings.

A finished conversation appends one line, or {"key", "dropped"} if nothing of it is kept. A killed
job resumes after the last complete line. A conversation of several documents writes them together,
each with "part": [i, n]; it counts only if all parts are there.
"""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from peagle.errors import UserError
from peagle.paths import write_json

ANSWERS = "answers.jsonl"
SETTINGS = "regenerate.json"
LENGTH_QUANTILES = {"min": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "max": 1.0}


@dataclass(slots=True)
class Counts:
    """What a job did: `tokens` counts kept answers, `generated` all of them."""

    answered: int = 0
    tokens: int = 0
    generated: int = 0
    resumed: int = 0  # conversations that an earlier run finished
    seconds: float = 0.0
    dropped: Counter[str] = field(default_factory=Counter)
    lengths: list[int] = field(default_factory=list)  # tokens of each document, prompts included

    @property
    def tokens_per_second(self) -> float:
        return self.generated / self.seconds if self.seconds else 0.0

    @property
    def length_quantiles(self) -> dict[str, int]:
        """The distribution of the documents' lengths."""
        ordered = sorted(self.lengths)
        last = len(ordered) - 1
        return {
            name: ordered[round(last * share)]
            for name, share in LENGTH_QUANTILES.items()
            if ordered
        }

    @property
    def settled(self) -> int:
        return self.answered + self.dropped.total()

    def as_dict(self) -> dict[str, Any]:
        return {
            "answered": self.answered,
            "tokens": self.tokens,
            "generated": self.generated,
            "dropped": dict(self.dropped),
            "resumed": self.resumed,
            "seconds": round(self.seconds, 2),
            "tokens_per_second": round(self.tokens_per_second, 1),
            "document_tokens": self.length_quantiles,
        }


class AnswerFile:
    """Open for one job at a time. `settled`: keys of finished conversations."""

    def __init__(self, out: Path, settings: dict[str, Any]) -> None:
        self.path = out / ANSWERS
        out.mkdir(parents=True, exist_ok=True)
        self.lock = FileLock(out / ".lock", timeout=0)
        try:
            self.lock.acquire()
        except Timeout as error:
            raise UserError(
                f"another job writes to {out}: wait for it, or use another `out`"
            ) from error
        try:
            check_settings(out, settings)
            self.settled = resume(self.path)
            self.file = self.path.open("ab")
        except BaseException:
            self.lock.release()
            raise
        self.counts = Counts()

    def __enter__(self) -> "AnswerFile":
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()
        self.lock.release()

    def keep(self, lines: list[dict[str, Any]]) -> None:
        self._append(lines)
        self.counts.answered += 1
        self.counts.lengths += [len(line["ids"]) for line in lines]
        self.counts.tokens += sum(end - start for line in lines for start, end in line["spans"])

    def drop(self, key: str, reason: str) -> None:
        self._append([{"key": key, "dropped": reason}])
        self.counts.dropped[reason] += 1

    def _append(self, lines: list[dict[str, Any]]) -> None:
        self.file.write(
            "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()
        )
        self.file.flush()


def check_settings(out: Path, settings: dict[str, Any]) -> None:
    """Refuse a folder that holds the answers of another target or other settings."""
    path = out / SETTINGS
    if path.is_file():
        try:
            before = json.loads(path.read_text())
        except ValueError as error:
            raise UserError(f"{path} is broken: use another `out`") from error
        for name in before | settings:
            if before.get(name) != settings.get(name):
                raise UserError(
                    f"{out} was started with {name} {before.get(name)!r}, and now it is"
                    f" {settings.get(name)!r}: use the former, or another `out`"
                )
        return
    if (out / ANSWERS).is_file() and (out / ANSWERS).stat().st_size:
        raise UserError(f"{out} holds answers but no {SETTINGS}: use another `out`")
    write_json(path, settings)


def resume(path: Path) -> set[str]:
    """Read the keys of complete conversations, and cut off what follows the last one."""
    keys: set[str] = set()
    if not path.is_file():
        return keys
    complete = position = 0
    with path.open("r+b") as file:
        for number, line in enumerate(file, start=1):
            position += len(line)
            if not line.endswith(b"\n"):
                break
            try:
                record = json.loads(line)
                part, parts = record.get("part", (1, 1))
                key = record["key"].removesuffix(f"#{part}") if parts > 1 else record["key"]
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(
                    f"{path}:{number} is not an answer: repair or remove that line"
                ) from error
            if part == parts:
                keys.add(key)
                complete = position
        file.truncate(complete)
    return keys


def cut_torn_line(path: Path) -> None:
    """Cut off an incomplete last line, left by a writer that was killed."""
    if not path.is_file():
        return
    with path.open("r+b") as file:
        end = 0
        for line in file:
            end += len(line) if line.endswith(b"\n") else 0
        file.truncate(end)
