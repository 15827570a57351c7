"""Right answers to HumanEval: a table of expected values, or a function for random tests."""

import ast
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DATA = Path(os.environ.get("PEAGLE_DATA", Path(__file__).parents[4] / "shared/data/bench"))
FILE = DATA / "humaneval.jsonl"
# These tests use random arguments, loops, or helper functions of the prompt.
SOLUTIONS = {
    "HumanEval/32": """
    low, high = -1.0, 1.0
    while poly(xs, low) * poly(xs, high) > 0:
        low, high = 2 * low, 2 * high
    for _ in range(200):
        middle = (low + high) / 2
        if poly(xs, low) * poly(xs, middle) > 0:
            low = middle
        else:
            high = middle
    return low
""",
    "HumanEval/33": """
    third = iter(sorted(l[::3]))
    return [next(third) if i % 3 == 0 else x for i, x in enumerate(l)]
""",
    "HumanEval/38": "    return encode_cyclic(encode_cyclic(s))\n",
    "HumanEval/44": """
    digits = ""
    while x:
        x, digit = divmod(x, base)
        digits = str(digit) + digits
    return digits
""",
    "HumanEval/50": "    return ''.join(chr((ord(c) - 97 - 5) % 26 + 97) for c in s)\n",
    "HumanEval/53": "    return x + y\n",
    "HumanEval/151": "    return sum(x * x for x in lst if x > 0 and x % 1 == 0 and x % 2)\n",
}


def read_humaneval() -> list[dict[str, Any]]:
    return [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]


def fields(row: Mapping[str, Any]) -> dict[str, str]:
    return {name: row[name] for name in ("prompt", "test", "entry_point")}


def right_answer(row: Mapping[str, Any]) -> str:
    if row["id"] in SOLUTIONS:
        return SOLUTIONS[row["id"]]
    return table_function(row["entry_point"], expected_values(row["test"]))


def wrong_answer(row: Mapping[str, Any]) -> str:
    """Wrong in one value, which has the right type if possible."""
    if row["id"] in SOLUTIONS:
        return "    return None\n"
    *rest, (arguments, value) = expected_values(row["test"])
    rest = [(others, other) for others, other in rest if others != arguments]
    if isinstance(value, bool):
        wrong: object = not value
    elif isinstance(value, (int, float)):
        wrong = value + 1
    else:
        wrong = [value]
    return table_function(row["entry_point"], [*rest, (arguments, wrong)])


def table_function(name: str, table: list[tuple[tuple, object]]) -> str:
    return (
        f"```python\ndef {name}(*args):\n"
        f"    for arguments, value in {table!r}:\n"
        "        if repr(arguments) == repr(args):\n            return value\n"
        "    raise KeyError(args)\n```"
    )


def expected_values(test: str) -> list[tuple[tuple, object]]:
    """Arguments and expected result of every call in the assertions of the test."""
    namespace: dict[str, Any] = {}
    exec(test, namespace)
    table: list[tuple[tuple, object]] = []
    for node in ast.walk(ast.parse(test)):
        if isinstance(node, ast.Assert) and (found := read_assertion(node.test)) is not None:
            call, expected = found
            values = [evaluate(part, namespace) for part in call.args]
            table.append((tuple(values), evaluate(expected, namespace)))
    return table


def evaluate(node: ast.expr, namespace: dict[str, Any]) -> Any:
    return eval(compile(ast.Expression(node), "test", "eval"), namespace)


def read_assertion(test: ast.expr) -> tuple[ast.Call, ast.expr] | None:
    """candidate(x) == y, candidate(x), not candidate(x), abs(candidate(x) - y) < small."""
    if isinstance(test, ast.UnaryOp):
        call = find_call(test.operand)
        return (call, ast.copy_location(ast.Constant(False), test)) if call else None
    if not isinstance(test, ast.Compare):
        call = find_call(test)
        return (call, ast.copy_location(ast.Constant(True), test)) if call else None
    call = find_call(test.left)
    if call is None:
        return None
    if isinstance(test.ops[0], ast.Lt):
        [difference] = [n for n in ast.walk(test.left) if isinstance(n, ast.BinOp)][:1]
        return call, difference.right
    return call, test.comparators[0]


def find_call(node: ast.expr) -> ast.Call | None:
    for part in ast.walk(node):
        if isinstance(part, ast.Call) and getattr(part.func, "id", "") == "candidate":
            return part
    return None
