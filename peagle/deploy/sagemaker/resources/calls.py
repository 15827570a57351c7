"""A call, and a resource: the calls that make, read, change and delete one thing of AWS's. Data, nothing is called."""

from dataclasses import dataclass
from typing import Any

Parameters = dict[str, Any]
VARIANT = "AllTraffic"  # the only one an endpoint of ours has


@dataclass(frozen=True, slots=True)
class Call:
    service: str  # as boto3 calls it
    operation: str  # as AWS calls it
    parameters: Parameters


@dataclass(frozen=True, slots=True)
class Resource:
    kind: str
    name: str
    create: Call
    read: Call
    found: str  # where the answer of `read` has it (JMESPath); nothing there: it does not exist
    delete: Call
    change: Call | None = None  # what makes it as wanted where it exists; None: it never changes
