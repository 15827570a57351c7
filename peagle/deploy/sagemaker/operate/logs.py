"""Log events of an endpoint's containers, from all instances, in order of time."""

import time
from collections.abc import Iterator
from typing import Any

from peagle.deploy.sagemaker.operate.clients import is_not_found
from peagle.deploy.sagemaker.operate.wait import Sleep
from peagle.deploy.sagemaker.resources.stack import LOG_GROUP_PREFIX
from peagle.errors import UserError

POLL_SECONDS = 5.0
MAX_DELAY_MS = 60_000  # an event may arrive this much after later ones


def log_events(
    client: Any,
    name: str,
    since_ms: int,
    follow: bool = False,
    sleep: Sleep = time.sleep,
) -> Iterator[dict[str, Any]]:
    """Yield the events from `since_ms` on; with `follow`, without end.

    Each poll starts MAX_DELAY_MS before the last event, so that late events are not missed;
    `seen` filters those that were already yielded.
    """
    seen: dict[str, int] = {}  # event id -> timestamp
    while True:
        for event in fetch_events(client, name, since_ms):
            if event["eventId"] not in seen:
                seen[event["eventId"]] = event["timestamp"]
                yield event
        if not follow:
            return
        since_ms = max(since_ms, max(seen.values(), default=0) - MAX_DELAY_MS)
        seen = {
            event_id: timestamp for event_id, timestamp in seen.items() if timestamp >= since_ms
        }
        sleep(POLL_SECONDS)


def fetch_events(client: Any, name: str, since_ms: int) -> Iterator[dict[str, Any]]:
    from botocore.exceptions import ClientError

    log_group = LOG_GROUP_PREFIX + name
    query = {"logGroupName": log_group, "startTime": since_ms, "interleaved": True}
    try:
        for page in client.get_paginator("filter_log_events").paginate(**query):
            yield from page["events"]
    except ClientError as error:
        if is_not_found(error):
            raise UserError(
                f"there is no log group {log_group}: no container of {name} has started yet"
            ) from error
        raise
