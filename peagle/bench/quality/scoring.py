"""How good the answers are: humaneval's pass@1 by running the programs, gsm8k's accuracy by the final number.

With lossless speculation a method's score is `none`'s, but for near ties. The answers are those that were measured.
"""

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal, InvalidOperation
from os import cpu_count
from typing import Any

from peagle.bench.load.jobs import RequestRecord
from peagle.bench.quality.sandbox import passes
from peagle.data.bench import Task
from peagle.results.cell import CellKey

FENCE = re.compile(r"```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)
CODE_STARTS = re.compile(r"^(?:from |import |def |class |@|async def )", re.MULTILINE)
AFTER_BODY = re.compile(r"\n(?:def |class |if __name__|print\(|assert |#|```)")
NUMBER = re.compile(r"-?\$?(?:\d[\d,]*)?\.?\d+")


def scores(
    answers: Mapping[CellKey, list[RequestRecord]], tasks: Mapping[str, Sequence[Task]]
) -> list[dict[str, Any]]:
    """One entry a set, method and form: of the lowest concurrency's answers. No answer is a wrong one."""
    told, seen = [], set[tuple[str, str, int | str, int]]()
    for key in sorted(answers, key=lambda key: key.concurrency):
        metric = metric_of(tasks.get(key.set, ()))
        kind = key.set, key.method, key.k, key.tree
        if metric is None or kind in seen:
            continue
        seen.add(kind)
        said = {record.task: record.text for record in answers[key] if record.turn == 0}
        good = count_good(metric, tasks[key.set], said)
        of = len(tasks[key.set])
        told.append(
            {
                "set": key.set,
                "method": key.method,
                "k": key.k,
                "tree": key.tree,
                "metric": metric,
                "value": round(good / of, 6),
                "of": of,
            }
        )
    return told


def metric_of(tasks: Sequence[Task]) -> str | None:
    """By what the tasks bring: tests to run, or a number to compare."""
    if tasks and all(
        isinstance(task.extra.get(n), str)
        for task in tasks
        for n in ("prompt", "test", "entry_point")
    ):
        return "pass@1"
    if tasks and all(
        isinstance(a := task.extra.get("answer"), str) and gold_number(a) is not None
        for task in tasks
    ):
        return "accuracy"
    return None


def count_good(metric: str, tasks: Sequence[Task], said: Mapping[str, str]) -> int:
    if metric == "accuracy":
        return sum(right_number(said.get(task.id, ""), task.extra["answer"]) for task in tasks)
    programs = [program_of(said[task.id], **wanted(task)) for task in tasks if task.id in said]
    with ThreadPoolExecutor(max(1, (cpu_count() or 2) // 2)) as pool:
        return sum(pool.map(passes, programs))


def wanted(task: Task) -> dict[str, str]:
    return {name: task.extra[name] for name in ("prompt", "test", "entry_point")}


# --- humaneval --------------------------------------------------------------------------------------------------------


def program_of(answer: str, prompt: str, test: str, entry_point: str) -> str:
    """The program to run. A whole function replaces the prompt's, whose imports and helpers stay; a body follows it."""
    code = code_of(answer, entry_point)
    if defines(code, entry_point):
        start = re.search(rf"^(?:async )?def {re.escape(entry_point)}\b", prompt, re.MULTILINE)
        code = (prompt[: start.start()] if start else "") + "\n" + code
    else:
        body = AFTER_BODY.split("\n" + code, maxsplit=1)[0].strip("\n")
        code = prompt + (body if body[:1] in (" ", "\t") else indent(body)) + "\n"
    return f"{code}\n{test}\ncheck({entry_point})\n"


def code_of(answer: str, entry_point: str) -> str:
    """The block that defines the function, else the first block of code, else the text from where code begins."""
    blocks = [
        body
        for language, body in FENCE.findall(answer)
        if language.lower() in ("", "python", "py", "python3")
    ]
    if blocks:
        return next((block for block in blocks if defines(block, entry_point)), blocks[0])
    start = CODE_STARTS.search(answer)
    return answer[start.start() :] if start and defines(answer, entry_point) else answer


def defines(code: str, name: str) -> bool:
    return re.search(rf"^(?:async )?def {re.escape(name)}\b", code, re.MULTILINE) is not None


def indent(body: str) -> str:
    return "\n".join("    " + line if line.strip() else line for line in body.splitlines())


# --- gsm8k ------------------------------------------------------------------------------------------------------------


def right_number(answer: str, gold: str) -> bool:
    found = said_number(answer)
    return found is not None and found == gold_number(gold)


def gold_number(gold: str) -> Decimal | None:
    found = NUMBER.findall(gold.rsplit("####", 1)[-1])
    return as_number(found[-1]) if found else None


def said_number(answer: str) -> Decimal | None:
    """After ####, in the last \\boxed{}, after the last `answer is` (or `answer:`), else the last number of all."""
    if "####" in answer and (found := NUMBER.search(answer.split("####", 1)[1])):
        return as_number(found[0])
    boxed = re.findall(r"\\boxed\{([^{}]*)\}", answer)
    if boxed and (found := NUMBER.search(boxed[-1])):
        return as_number(found[0])
    stated = re.split(r"answer(?:\s+is|\s*:)", answer, flags=re.IGNORECASE)
    if len(stated) > 1 and (found := NUMBER.search(stated[-1])):
        return as_number(found[0])
    numbers = NUMBER.findall(answer)
    return as_number(numbers[-1]) if numbers else None


def as_number(text: str) -> Decimal | None:
    try:
        return Decimal(text.replace(",", "").replace("$", "")).normalize()
    except InvalidOperation:
        return None
