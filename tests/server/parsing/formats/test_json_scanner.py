"""JsonScanner accepts what json.loads accepts as an object, and finds its members."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.server.parsing.formats.json_scanner import MAX_DEPTH, JsonScanner
from tests.support.api.parsing import cut

FINITE_FLOATS = st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | FINITE_FLOATS | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)


def scan(pieces: list[str]) -> tuple[JsonScanner, int]:
    """The scanner after the pieces, and the number of characters it consumed."""
    scanner, used = JsonScanner(), 0
    for piece in pieces:
        taken = scanner.feed(piece)
        used += taken
        if taken < len(piece):
            break
    return scanner, used


def refuse(name: str) -> None:
    raise ValueError(name)


@settings(max_examples=40)
@given(
    st.dictionaries(st.text(), VALUES, max_size=4),
    st.sampled_from([None, 1]),
    st.booleans(),
    st.lists(st.integers(0, 300)),
)
def test_objects(value: dict[str, Any], indent: int | None, ascii: bool, cuts: list[int]) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii)
    scanner, used = scan(cut(text + "} more", cuts))
    assert scanner.done
    assert not scanner.failed
    assert used == len(text)
    members = {
        json.loads(text[member.key_start : member.key_end]): json.loads(
            text[member.value_start : member.value_end]
        )
        for member in scanner.members
    }
    assert members == value


@settings(max_examples=300)
@given(st.text('{}[]":,0123-+.eE\\u/tfnrlsa \n\x01', max_size=14), st.booleans())
def test_scanner_agrees_with_json_loads(body: str, wrap: bool) -> None:
    text = '{"a":' + body + "}" if wrap else "{" + body
    scanner, used = scan(list(text))
    try:
        json.loads(text, parse_constant=refuse)
        valid = True
    except ValueError:
        valid = False
    assert valid == (scanner.done and not text[used:].strip(" \n"))


@pytest.mark.parametrize("number", ["0", "-0", "1e5", "1E-5", "1.5", "-12.50e+07", "10"])
def test_numbers(number: str) -> None:
    assert scan([f'{{"a":{number}}}'])[0].done


@pytest.mark.parametrize("number", ["00", "-", "+1", "1.", ".5", "1e", "1e+", "1.e5", "0x1", "1-2"])
def test_invalid_numbers_are_refused(number: str) -> None:
    scanner, _ = scan([f'{{"a":{number}}}'])
    assert scanner.failed
    assert not scanner.done


def test_depth_is_limited() -> None:
    def nested(depth: int) -> str:
        return '{"a":' + "[" * (depth - 1) + "]" * (depth - 1) + "}"

    assert scan([nested(MAX_DEPTH)])[0].done
    assert scan([nested(MAX_DEPTH + 1)])[0].failed
