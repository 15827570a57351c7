"""Counts of drafts in the log of vLLM's container, for images whose answers do not carry them.

vLLM writes both lines every 10 seconds in which it worked; the second only with a drafter:

    Engine 000: Avg prompt throughput: 5.1 tokens/s, Avg generation throughput: 51.2 tokens/s, ...
    SpecDecoding metrics: Mean acceptance length: 2.41, ..., Accepted: 123 tokens, Drafted: 261 ...
"""

import re
import time
from typing import Any

from peagle.deploy.sagemaker.operate.clients import translate_aws_errors
from peagle.deploy.sagemaker.operate.logs import POLL_SECONDS, log_events
from peagle.deploy.verify.endpoint import Observation
from peagle.errors import UserError
from peagle.results.spec_counters import SpecCounters

MAX_POLLS = 13  # about a minute: vLLM's interval, and the delay of CloudWatch
WORK_LINE = re.compile(r"Avg generation throughput: ([\d.]+) tokens/s")
SPEC_LINE = re.compile(
    r"SpecDecoding metrics: Mean acceptance length: ([\d.]+),.*"
    r"Accepted: (\d+) tokens, Drafted: (\d+) tokens"
)


def observe_log(client: Any, name: str, since_ms: int) -> Observation | None:
    """Wait for the counts; None if the log cannot be read or has no line of vLLM's."""
    worked = False
    for poll in range(MAX_POLLS):
        if poll:
            time.sleep(POLL_SECONDS)
        try:
            with translate_aws_errors():
                lines = [event["message"] for event in log_events(client, name, since_ms)]
        except UserError:
            return None
        spec = parse_counts(lines)
        if spec is not None:
            return Observation("logs", spec)
        if worked:  # in the poll before: the line of the counts would be here by now
            return Observation("logs", None)
        matches = [WORK_LINE.search(line) for line in lines]
        worked = any(match and float(match[1]) > 0 for match in matches)
    return None


def parse_counts(lines: list[str]) -> SpecCounters | None:
    """The sum over all lines. vLLM does not write the drafts: accepted / (length - 1)."""
    matches = [match for line in lines if (match := SPEC_LINE.search(line))]
    if not matches:
        return None
    total = SpecCounters()
    for match in matches:
        accepted = int(match[2])
        drafted = int(match[3])
        total.accepted += accepted
        total.draft_tokens += drafted
        extra = float(match[1]) - 1
        total.drafts += max(1, round(accepted / extra)) if extra > 0 else min(1, drafted)
    return total
