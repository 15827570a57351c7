"""Scores of the measured answers: pass@1 of humaneval, accuracy of gsm8k.

pass@1 runs the programs, accuracy compares the final number. With lossless speculation a method has
the score of `none`, except for near ties.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from os import cpu_count

from peagle.bench.quality.programs import build_submission
from peagle.bench.quality.sandbox import find_sandbox, passes
from peagle.bench.quality.word_problems import is_right_number, reference_number
from peagle.data.bench import Task
from peagle.results.key import CellKey
from peagle.results.quality import Score
from peagle.results.request_record import RequestRecord

PROGRAM_FIELDS = ("prompt", "test", "entry_point")


def score_answers(
    answers: Mapping[CellKey, list[RequestRecord]], tasks: Mapping[str, Sequence[Task]]
) -> list[Score]:
    """One score for each set, method and draft form, from the answers of the lowest concurrency.

    A task without an answer counts as wrong.
    """
    scores: list[Score] = []
    scored: set[tuple[str, str, int | str, int]] = set()
    for key in sorted(answers, key=lambda key: key.concurrency):
        set_tasks = tasks.get(key.set, ())
        metric = choose_metric(set_tasks)
        form = key.set, key.method, key.k, key.tree
        if metric is None or form in scored:
            continue
        scored.add(form)
        texts = {record.task: record.text for record in answers[key] if record.turn == 0}
        share = count_right(metric, set_tasks, texts) / len(set_tasks)
        scores.append(Score(*form, metric, round(share, 6), len(set_tasks)))
    return scores


def require_scoring(tasks: Mapping[str, Sequence[Task]]) -> None:
    """Raises UserError where these tasks cannot be scored, before anything is measured."""
    if any(choose_metric(set_tasks) == "pass@1" for set_tasks in tasks.values()):
        find_sandbox()


def choose_metric(tasks: Sequence[Task]) -> str | None:
    """By the data of the tasks: tests to run, or a number to compare."""
    if not tasks:
        return None
    if all(isinstance(task.extra.get(name), str) for task in tasks for name in PROGRAM_FIELDS):
        return "pass@1"
    references = [task.extra.get("answer") for task in tasks]
    if all(isinstance(text, str) and reference_number(text) is not None for text in references):
        return "accuracy"
    return None


def count_right(metric: str, tasks: Sequence[Task], texts: Mapping[str, str]) -> int:
    """`texts`: the answer to each task, by its id."""
    if metric == "accuracy":
        return sum(is_right_number(texts.get(task.id, ""), task.extra["answer"]) for task in tasks)
    programs = [
        build_submission(texts[task.id], **{name: task.extra[name] for name in PROGRAM_FIELDS})
        for task in tasks
        if task.id in texts
    ]
    find_sandbox()  # once, before the threads
    with ThreadPoolExecutor(max(1, (cpu_count() or 2) // 2)) as pool:
        return sum(pool.map(passes, programs))
