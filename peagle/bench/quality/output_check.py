"""The output check: greedy answers with drafts must be those without.

Where they are not, the first token that differs is told, and by what margin the target preferred one of the two there:
the gap of their log-probabilities in one pass over the common beginning. Rounding flips near ties: in bfloat16,
where logits are 0.125 or 0.25 apart, by up to a few such steps; in float32 a few thousandths would be a fault. A later
turn is compared only where the answers before it were the same.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch

from peagle.bench.load.jobs import LoadJob, RequestRecord
from peagle.loaded import LoadedPair
from peagle.results.cell import CellKey

KEPT = 20  # differences told of a cell

Said = Sequence[int] | str  # an answer: token ids; or text, where an endpoint tells no ids
Margin = Callable[
    [str, list[str], Said, Any, Any], float | None
]  # task, answers before, common beginning, the two


def check(
    mine: Iterable[RequestRecord], base: Iterable[RequestRecord], margin: Margin
) -> dict[str, Any]:
    known = {(record.task, record.turn): record for record in base}
    answers: dict[str, list[str]] = {}
    compared, differences = 0, list[dict[str, Any]]()
    for record in sorted(mine, key=lambda record: record.turn):
        other = known.get((record.task, record.turn))
        before = answers.setdefault(record.task, [])
        if other is None or len(before) < record.turn:
            continue
        compared += 1
        at = first_difference(said(record, other), said(other, record))
        if at is None:
            before.append(record.text)
            continue
        told = {"task": record.task, "turn": record.turn, "at": at, "margin": None}
        if len(differences) < KEPT:
            a, b = said(record, other), said(other, record)
            told["margin"] = margin(record.task, before, a[:at], a[at : at + 1], b[at : at + 1])
        differences.append(told)
    return {
        "compared": compared,
        "identical": compared - len(differences),
        "differences": differences[:KEPT],
    }


def said(record: RequestRecord, other: RequestRecord) -> Said:
    return record.ids if record.ids and other.ids else record.text


def first_difference(a: Said, b: Said) -> int | None:
    return next((i for i, (x, y) in enumerate(zip_longest(a, b)) if x != y), None)


def baseline(
    key: CellKey, answers: Mapping[CellKey, list[RequestRecord]]
) -> list[RequestRecord] | None:
    """`none`'s answers to the same set: at the same concurrency, else at the lowest there is."""
    same = [other for other in answers if other.set == key.set and other.method == "none"]
    if not same:
        return None
    return answers[
        min(same, key=lambda other: (other.concurrency != key.concurrency, other.concurrency))
    ]


def target_margin(loaded: LoadedPair, jobs: Sequence[LoadJob]) -> Margin:
    """Asks the target itself; the same question once."""
    by_task = {job.task.id: job for job in jobs}
    known: dict[tuple[Any, ...], float | None] = {}

    @torch.inference_mode()
    def margin(task: str, before: list[str], beginning: Said, a: Any, b: Any) -> float | None:
        if len(a) != 1 or len(b) != 1 or isinstance(beginning, str):
            return None
        question = (task, *beginning, a[0], b[0])
        if question not in known:
            ids = loaded.encode(by_task[task].messages(before)) + list(beginning)
            logits = loaded.target.forward(
                torch.tensor(ids, device=loaded.target.device), keep=1
            ).logits[-1]
            logprobs = logits.float().log_softmax(-1)
            known[question] = round(float((logprobs[a[0]] - logprobs[b[0]]).abs()), 6)
        return known[question]

    return margin


def no_margin(*_: Any) -> None:
    return None
