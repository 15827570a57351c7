"""Scores of code and numbers in the form in which chat models write them; hostile programs."""

from decimal import Decimal

import pytest

from peagle.bench.quality.programs import build_submission
from peagle.bench.quality.sandbox import passes
from peagle.bench.quality.scoring import score_answers
from peagle.bench.quality.word_problems import answer_number, is_right_number
from peagle.data.bench import Task
from peagle.results.key import CellKey
from peagle.results.quality import Score
from peagle.results.request_record import RequestRecord

PROMPT = (
    "from typing import List\n\n\ndef helper(x):\n    return x\n\n\n"
    'def add(a: int, b: int) -> int:\n    """Add."""\n'
)
TEST = "def check(candidate):\n    assert candidate(2, 3) == 5\n"
HUMANEVAL = {"prompt": PROMPT, "test": TEST, "entry_point": "add"}

RIGHT = {
    "a block": "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nIt adds.",
    "no language": "```\ndef add(a: int, b: int) -> int:\n    return helper(a) + b\n```",
    "the second block": "Say\n```python\nprint(1)\n```\nand\n"
    "```python\ndef add(a, b):\n    return a + b\n```",
    "cut off": "```python\ndef add(a, b):\n    return a + b",
    "uses the prompt's import": "```python\ndef add(a: List[int], b):\n    return a + b\n```",
    "no fence": "Sure.\n\ndef add(a, b):\n    return a + b\n",
    "a body": "    return a + b\n",
    "a body and more": "    return a + b\n\ndef other():\n    pass\n",
    "a body in a block": "```python\nreturn a + b\n```",
    "its own tests": "```python\ndef add(a, b):\n    return a + b\n\nassert add(1, 1) == 2\n```",
}
WRONG = {
    "wrong": "```python\ndef add(a, b):\n    return a - b\n```",
    "prose": "I would add them.",
    "empty": "",
    "exits at once": "```python\nimport os\ndef add(a, b):\n    os._exit(0)\n```",
    "exits normally": "```python\nimport sys\ndef add(a, b):\n    sys.exit(0)\n```",
    "prints a verdict": "```python\nprint('pass')\nraise SystemExit(0)\ndef add(a, b): ...\n```",
    "bytes": "```python\n\x00\ud800\n```",
    "equal to everything": "```python\nclass Any(int):\n"
    "    def __eq__(self, other):\n        return True\n\n"
    "def add(a, b):\n    return Any()\n```",
    "its own check": "```python\ndef add(a, b): ...\n\ndef check(candidate): ...\n```",
}


@pytest.mark.parametrize("answer", RIGHT.values(), ids=RIGHT.keys())
def test_correct_code_passes(answer: str) -> None:
    assert passes(build_submission(answer, **HUMANEVAL))


@pytest.mark.parametrize("answer", WRONG.values(), ids=WRONG.keys())
def test_wrong_code_fails(answer: str) -> None:
    assert not passes(build_submission(answer, **HUMANEVAL))


NUMBERS = {
    "She has 9 * 2 = 18 dollars.\n#### 18": "18",
    "#### $1,234.50 in all, of 7": "1234.5",
    r"so \boxed{42} of 7": "42",
    "The answer is 12. That is 3 more than 9.": "12",
    "**Answer:** $5.00 per 2": "5",
    "First 3, then 4, in the end -7.": "-7",
    "It takes 1,000,000 steps": "1000000",
    "half is .5": "0.5",
    "nothing": None,
}


@pytest.mark.parametrize(("answer", "number"), NUMBERS.items(), ids=lambda x: str(x)[:20])
def test_the_final_number_is_found(answer: str, number: str | None) -> None:
    assert answer_number(answer) == (None if number is None else Decimal(number))


def test_right_numbers() -> None:
    assert is_right_number("It is 18.0 dollars", "Janet ...\n#### 18")
    assert not is_right_number("19", "#### 18")
    assert not is_right_number("no idea", "#### 18")


def test_scores_of_every_method() -> None:
    code = {"good": RIGHT["a block"], "bad": WRONG["wrong"]}
    tasks = {
        "humaneval": [
            Task(name, ("?",), extra=HUMANEVAL) for name in ("good", "bad", "never answered")
        ],
        "gsm8k": [Task(name, ("?",), extra={"answer": "#### 4"}) for name in ("good", "bad")],
        "mt_bench": [Task("a", ("?", "!"))],
    }
    answers = {
        CellKey("humaneval", "none", 0, 1): [
            RequestRecord(n, 0, 0.0, text=text) for n, text in code.items()
        ],
        CellKey("gsm8k", "p-eagle", 5, 8): [
            RequestRecord("good", 0, 0.0, text="5"),
            RequestRecord("bad", 0, 0.0, text="5"),
        ],
        CellKey("gsm8k", "p-eagle", 5, 1): [
            RequestRecord("good", 0, 0.0, text="2 + 2 = 4"),
            RequestRecord("bad", 0, 0.0, text="5"),
        ],
        CellKey("mt_bench", "none", 0, 1): [RequestRecord("a", 0, 0.0, text="x")],
    }
    scores = sorted(score_answers(answers, tasks), key=lambda score: score.set)
    assert scores == [
        Score("gsm8k", "p-eagle", 5, 0, "accuracy", 0.5, 2),
        Score("humaneval", "none", 0, 0, "pass@1", 0.333333, 3),
    ]
    assert scores[0].to_json() == {
        "set": "gsm8k",
        "method": "p-eagle",
        "k": 5,
        "tree": 0,
        "metric": "accuracy",
        "value": 0.5,
        "of": 2,
    }
    assert [Score.from_json(score.to_json()) for score in scores] == scores
