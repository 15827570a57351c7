"""Call and Resource: the API calls that create, read, update and delete an AWS resource.

They are data only: nothing here calls AWS.
"""

from dataclasses import dataclass
from typing import Any

Parameters = dict[str, Any]
VARIANT = "AllTraffic"  # the only variant of an endpoint


@dataclass(frozen=True, slots=True)
class Call:
    service: str  # the name in boto3
    operation: str  # the name in the AWS API
    parameters: Parameters


@dataclass(frozen=True, slots=True)
class Resource:
    kind: str
    name: str
    create: Call
    read: Call
    # JMESPath of the resource in the response of `read`; no match: the resource does not exist.
    result_path: str
    delete: Call
    update: Call | None = None  # brings an existing resource up to date; None: it is immutable
