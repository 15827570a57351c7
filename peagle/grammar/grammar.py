"""Grammar: what an answer must follow, as its author wrote it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from peagle.errors import UserError

MAX_GRAMMAR_CHARS = 1 << 18
# llguidance needs a state for each remainder: 10,000 take 0.2 s, 10,000,000 never end.
MAX_MULTIPLE = 10_000
# Keywords of a schema whose values are data, not schemas.
DATA_KEYWORDS = frozenset({"const", "default", "enum", "examples"})


@dataclass(frozen=True, slots=True)
class Grammar:
    kind: Literal["json", "regex", "lark", "ebnf"]
    text: str

    @classmethod
    def json(cls, schema: Mapping[str, Any] | bool | str | None = None) -> "Grammar":
        """Answers that follow a JSON schema; without one, any JSON object."""
        if schema is False:
            raise UserError(
                "the schema false allows nothing: use true for any JSON, or another schema"
            )
        if isinstance(schema, str):
            return cls("json", schema)
        if schema is None:
            schema = {"type": "object"}
        elif schema is True:
            schema = {}
        return cls("json", json.dumps(schema, ensure_ascii=False))

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> "Grammar":
        """Answers that are one of these texts."""
        if not texts or not all(texts):
            raise UserError("a choice needs at least one text to choose from, and no empty ones")
        quoted = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
        # One terminal, because llguidance does not accept thousands of rules.
        return cls("lark", f"start: TEXT\nTEXT: {quoted}")

    @classmethod
    def ebnf(cls, rules: str) -> "Grammar":
        """Answers that follow rules in Lark's notation, or in GBNF."""
        return cls("ebnf", rules)

    def __post_init__(self) -> None:
        if len(self.text) > MAX_GRAMMAR_CHARS:
            raise UserError(
                f"the grammar has {len(self.text):,} characters, and at most"
                f" {MAX_GRAMMAR_CHARS:,} are supported: make it smaller"
            )

    def check(self) -> None:
        """Refuse what is known to take llguidance for ever."""
        if self.kind == "json" and "multipleOf" in self.text:
            for value in multiples(self.text):
                check_multiple(value)


def multiples(schema_text: str) -> Iterator[int | Decimal]:
    """The numbers of all `multipleOf` in a schema; none if the text is not a schema."""
    try:
        schemas: list[Any] = [json.loads(schema_text, parse_float=Decimal)]
    except (ValueError, ArithmeticError, RecursionError):
        return  # llguidance reports what is wrong with it.
    while schemas:
        schema = schemas.pop()
        if isinstance(schema, list):
            schemas.extend(schema)
        elif isinstance(schema, dict):
            value = schema.get("multipleOf")
            if isinstance(value, int | Decimal):
                yield value
            schemas.extend(part for key, part in schema.items() if key not in DATA_KEYWORDS)


def check_multiple(value: int | Decimal) -> None:
    """Only the digits between leading and trailing zeros count: 2500000 is as easy as 25."""
    digits = "".join(map(str, Decimal(value).as_tuple().digits)).strip("0")
    if len(digits) > len(str(MAX_MULTIPLE)) or int(digits or "0") > MAX_MULTIPLE:
        shown = str(value)[:40]
        raise UserError(
            f"multipleOf {shown} needs too many states: use at most {MAX_MULTIPLE:,}, or such a"
            " number with zeros behind it"
        )
