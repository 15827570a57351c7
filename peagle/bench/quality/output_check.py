"""The output check: answers must equal those of plain decoding, whatever the drafts and the load.

Plain decoding is `none` at the lowest concurrency; the cells of `none` at others are compared too.

Where they do not, the first token that differs is recorded, and the margin by which the target
preferred one of the two: the gap of their log-probabilities in one pass over the common prefix.
Rounding flips near ties: in bfloat16, where logits are 0.125 or 0.25 apart, by up to a few such
steps; in float32 a few thousandths would be a bug. A later turn is compared only where the answers
before it were identical.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest

import torch

from peagle.bench.load.jobs import LoadJob
from peagle.loaded import LoadedPair
from peagle.results.key import CellKey
from peagle.results.quality import AnswerDifference, OutputCheck
from peagle.results.request_record import RequestRecord

MAX_DIFFERENCES = 20  # recorded for a cell

Answer = Sequence[int] | str  # token ids, or text where an endpoint reports no ids
# Arguments: task, answers to the turns before, common prefix, next token of either answer.
Margin = Callable[[str, list[str], Answer, Answer, Answer], float | None]


def check_answers(
    records: Iterable[RequestRecord], baseline: Iterable[RequestRecord], margin: Margin
) -> OutputCheck:
    baseline_by_turn = {(record.task, record.turn): record for record in baseline}
    identical_answers: dict[str, list[str]] = {}  # by task, up to the first difference
    compared = 0
    different = 0
    differences: list[AnswerDifference] = []
    for record in sorted(records, key=lambda record: record.turn):
        expected = baseline_by_turn.get((record.task, record.turn))
        earlier = identical_answers.setdefault(record.task, [])
        if expected is None or len(earlier) < record.turn:
            continue
        compared += 1
        answer, expected_answer = comparable(record, expected)
        position = first_difference(answer, expected_answer)
        if position is None:
            earlier.append(record.text)
            continue
        different += 1
        if len(differences) < MAX_DIFFERENCES:
            gap = margin(
                record.task,
                earlier,
                answer[:position],
                answer[position : position + 1],
                expected_answer[position : position + 1],
            )
            differences.append(AnswerDifference(record.task, record.turn, position, gap))
    return OutputCheck(compared, compared - different, tuple(differences))


def comparable(record: RequestRecord, other: RequestRecord) -> tuple[Answer, Answer]:
    """Token ids where both have them, else texts."""
    if record.ids and other.ids:
        return record.ids, other.ids
    return record.text, other.text


def first_difference(a: Answer, b: Answer) -> int | None:
    return next((i for i, (x, y) in enumerate(zip_longest(a, b)) if x != y), None)


def baseline_key(set_name: str, answers: Iterable[CellKey]) -> CellKey | None:
    """The cell of plain decoding: `none` on the same set, at the lowest concurrency."""
    plain = [key for key in answers if key.set == set_name and key.method == "none"]
    return min(plain, key=lambda key: key.concurrency, default=None)


def target_margin(loaded: LoadedPair, jobs: Sequence[LoadJob]) -> Margin:
    """A Margin that runs the target, once for each question."""
    job_by_task = {job.task.id: job for job in jobs}
    cache: dict[tuple[str | int, ...], float | None] = {}

    @torch.inference_mode()
    def margin(task: str, earlier: list[str], prefix: Answer, a: Answer, b: Answer) -> float | None:
        if len(a) != 1 or len(b) != 1 or isinstance(prefix, str):
            return None
        question = (task, *prefix, a[0], b[0])
        if question not in cache:
            ids = loaded.encode(job_by_task[task].messages(earlier)) + list(prefix)
            tokens = torch.tensor(ids, device=loaded.target.device)
            logits = loaded.target.forward(tokens, keep=1).logits[-1]
            logprobs = logits.float().log_softmax(-1)
            gap = (logprobs[int(a[0])] - logprobs[int(b[0])]).abs()
            cache[question] = round(float(gap), 6)
        return cache[question]

    return margin


def no_margin(*_: object) -> None:
    return None
