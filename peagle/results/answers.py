"""AnswerFile: the answers of each cell's first run, in NAME.answers.jsonl beside the result file.

They are what is checked against `none` and scored. A line is a cell:

    {"set": ..., "method": ..., "k": ..., "concurrency": ..., "tree": ...,
     "answers": [[task, turn, token ids, text], ...]}
"""

import json
from collections.abc import Sequence
from pathlib import Path

from peagle.results.key import CellKey
from peagle.results.request_record import RequestRecord

Answers = dict[CellKey, list[RequestRecord]]


class AnswerFile:
    def __init__(self, result_path: Path) -> None:
        self.path = result_path.with_suffix(".answers.jsonl")

    def read(self) -> Answers:
        """The last line of a cell counts. A line that was cut short by a kill is skipped."""
        answers: Answers = {}
        if not self.path.exists():
            return answers
        for line in self.path.read_text().splitlines():
            try:
                raw = json.loads(line)
                key = CellKey.from_json(raw)
                records = [
                    RequestRecord(task, turn, 0.0, ids=ids, text=text)
                    for task, turn, ids, text in raw["answers"]
                ]
            except (ValueError, KeyError, TypeError, AttributeError):
                continue
            if key is not None:
                answers[key] = records
        return answers

    def append(self, key: CellKey, records: Sequence[RequestRecord]) -> None:
        answers = [[r.task, r.turn, r.ids, r.text] for r in records if r.error is None]
        with self.path.open("a") as file:
            file.write(json.dumps(key.to_json() | {"answers": answers}) + "\n")

    def delete(self) -> None:
        self.path.unlink(missing_ok=True)
