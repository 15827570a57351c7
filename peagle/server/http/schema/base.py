"""RequestModel: the base of all request bodies, and the types and limits of their fields.

Unknown fields are ignored. Lists stop at their first wrong item: the errors of a million items
would take gigabytes and many seconds.
"""

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

MAX_LOGIT_BIAS = 1 << 16
MAX_INT = 2**31 - 1
MAX_NAME_CHARS = 512
MAX_TYPE_CHARS = 64
DICT_PART = 64  # Entries of a dictionary that are checked at once.

T = TypeVar("T")
TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]
Items = Annotated[list[T], Field(fail_fast=True)]
TokenIds = Annotated[Items[TokenId], Field(min_length=1)]
Name = Annotated[str, StringConstraints(max_length=MAX_NAME_CHARS)]
TypeName = Annotated[str, StringConstraints(max_length=MAX_TYPE_CHARS)]


class RequestModel(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, protected_namespaces=())


def check_in_parts(value: Any, check: Callable[[Any], dict[int, float]]) -> dict[int, float]:
    """Check a dictionary part by part, and stop at the first part with a wrong entry.

    Pydantic before 2.14 always collects the errors of all entries of a dictionary.
    """
    if not isinstance(value, dict):
        return check(value)
    if len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"there are {len(value)} entries, at most {MAX_LOGIT_BIAS} are allowed")
    entries = list(value.items())
    checked: dict[int, float] = {}
    for start in range(0, len(entries), DICT_PART):
        checked |= check(dict(entries[start : start + DICT_PART]))
    return checked
