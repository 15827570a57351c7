"""benchmarks/server/soak.py: outcomes that make a run fail."""

import asyncio
from collections import Counter

import pytest

from benchmarks.server.soak import Sample, Soak, SoakRequest, report

SAMPLES = [Sample(float(i), i, i, 100.0, 100.0, 1) for i in range(4)]


@pytest.mark.parametrize(
    ("outcomes", "well"),
    [
        ({"answered": 9, "told": 3}, True),
        ({"answered": 9, "full": 1}, True),
        ({"answered": 9, "refused": 1}, False),
        ({"answered": 9, "queued, told": 1}, False),
        ({"answered": 9, "other": 1}, False),
    ],
)
def test_verdict_of_a_run_with_a_kill(outcomes: dict[str, int], well: bool) -> None:
    run = Soak("http://nowhere", 8, 1, Counter(outcomes), recovered_at=2.0)
    assert report(run, SAMPLES, lost=0) == well
    run.late_errors = 1
    assert not report(run, SAMPLES, lost=0)


def test_every_request_must_be_answered_without_a_kill() -> None:
    run = Soak("http://nowhere", 8, 1, Counter(answered=9, full=1))
    assert not report(run, SAMPLES, lost=0)


@pytest.mark.parametrize(
    ("status", "outcome"), [("503", "refused"), ("429", "full"), ("500", "other")]
)
def test_outcomes_by_status(status: str, outcome: str) -> None:
    async def main() -> SoakRequest:
        reader = asyncio.StreamReader()
        reader.feed_data(f"HTTP/1.1 {status} Reason\r\n".encode())
        reader.feed_eof()
        request = SoakRequest()
        await Soak("http://nowhere", 8, 1)._read(request, reader)
        return request

    assert asyncio.run(main()).outcome == outcome
