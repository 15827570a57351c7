"""What an endpoint's containers write, from all its instances, in order of time."""

import time
from collections.abc import Callable, Iterator
from typing import Any

from peagle.deploy.sagemaker.operate.clients import absent
from peagle.deploy.sagemaker.resources.stack import LOGS
from peagle.errors import UserError

EVERY = 5.0  # seconds between two looks
LATE = 60_000  # milliseconds: events may come so much after later ones


def events(
    client: Any,
    name: str,
    since: int,
    follow: bool = False,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[dict[str, Any]]:
    """From `since` (milliseconds) on; with `follow` without end."""
    seen: dict[
        str, int
    ] = {}  # id -> time, of the last minute: what is looked at twice is told once
    while True:
        for event in look(client, name, since):
            if event["eventId"] not in seen:
                seen[event["eventId"]] = event["timestamp"]
                yield event
        if not follow:
            return
        since = max(since, max(seen.values(), default=0) - LATE)
        seen = {one: when for one, when in seen.items() if when >= since}
        sleep(EVERY)


def look(client: Any, name: str, since: int) -> Iterator[dict[str, Any]]:
    from botocore.exceptions import ClientError

    asked = {"logGroupName": LOGS + name, "startTime": since, "interleaved": True}
    try:
        for page in client.get_paginator("filter_log_events").paginate(**asked):
            yield from page["events"]
    except ClientError as error:
        if absent(error):
            raise UserError(
                f"there is no log group {LOGS + name}: no container of {name} has started yet"
            ) from error
        raise
