"""The tests of humaneval in the sandbox: correct answers pass, an answer with a wrong value fails.

Every argument and every expected value of the set is sent between the two processes.
"""

import pytest

from peagle.bench.quality.programs import build_submission
from peagle.bench.quality.sandbox import passes
from tests.support.bench.humaneval import (
    FILE,
    SOLUTIONS,
    fields,
    read_humaneval,
    right_answer,
    wrong_answer,
)

pytestmark = pytest.mark.skipif(not FILE.exists(), reason=f"no humaneval in {FILE.parent}")


def mistakes(ids: set[str] | None = None) -> list[str]:
    found = []
    for row in read_humaneval():
        if ids is not None and row["id"] not in ids:
            continue
        if not passes(build_submission(right_answer(row), **fields(row))):
            found.append(f"{row['id']}: a right answer fails")
        if passes(build_submission(wrong_answer(row), **fields(row))):
            found.append(f"{row['id']}: a wrong answer passes")
    return found


def test_some_tasks() -> None:
    """Tasks with random arguments or with helpers in the prompt, and some of the others."""
    assert mistakes({*SOLUTIONS, *(f"HumanEval/{number}" for number in range(0, 164, 30))}) == []


@pytest.mark.abuse
def test_every_task() -> None:
    assert mistakes() == []
