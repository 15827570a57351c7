"""Programs in answers to humaneval: the code, completed by the prompt, and the test of it."""

import re
from dataclasses import dataclass

CODE_FENCE = re.compile(r"```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)
CODE_START = re.compile(r"^(?:from |import |def |class |@|async def )", re.MULTILINE)
BODY_END = re.compile(r"\n(?:def |class |if __name__|print\(|assert |#|```)")
PYTHON_FENCES = ("", "python", "py", "python3")


@dataclass(frozen=True, slots=True)
class Submission:
    """What the sandbox runs: `solution` in one process, `setup` and `test` in another.

    `test` defines check(candidate); `setup` is what it uses of the prompt, such as helpers.
    """

    solution: str
    setup: str
    test: str
    entry_point: str


def build_submission(answer: str, prompt: str, test: str, entry_point: str) -> Submission:
    """The program to run.

    A whole function replaces the prompt's, whose imports and helpers stay. A body is appended to
    the prompt.
    """
    code = extract_code(answer, entry_point)
    start = re.search(rf"^(?:async )?def {re.escape(entry_point)}\b", prompt, re.MULTILINE)
    setup = prompt[: start.start()] if start else ""
    if defines(code, entry_point):
        code = setup + "\n" + code
    else:
        body = BODY_END.split("\n" + code, maxsplit=1)[0].strip("\n")
        code = prompt + (body if body[:1] in (" ", "\t") else indent(body)) + "\n"
    return Submission(code, setup, test, entry_point)


def extract_code(answer: str, entry_point: str) -> str:
    """The block that defines the function, else the first block, else the unfenced code."""
    blocks = [
        body for language, body in CODE_FENCE.findall(answer) if language.lower() in PYTHON_FENCES
    ]
    if blocks:
        return next((block for block in blocks if defines(block, entry_point)), blocks[0])
    start = CODE_START.search(answer)
    return answer[start.start() :] if start and defines(answer, entry_point) else answer


def defines(code: str, name: str) -> bool:
    return re.search(rf"^(?:async )?def {re.escape(name)}\b", code, re.MULTILINE) is not None


def indent(body: str) -> str:
    return "\n".join("    " + line if line.strip() else line for line in body.splitlines())
