"""Collects the score of every case and prints the table when all have run."""

from collections.abc import Iterator

import pytest

from parity_replay import Score

HEAD = ("case", "K", "requests", "proposals", "step loop", "control", "draft tokens", "accepted", "counters", "output")
SCORES = pytest.StashKey[dict[str, tuple[int, Score]]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SCORES] = {}


@pytest.fixture
def scores(request: pytest.FixtureRequest) -> Iterator[dict[str, tuple[int, Score]]]:
    """Case name -> K and score."""
    yield request.config.stash[SCORES]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    scores = config.stash[SCORES]
    if not scores:
        return
    rows = [HEAD, *(cells(name, k, score) for name, (k, score) in scores.items())]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    terminalreporter.section("peagle against vLLM (equal / total)")
    for row in rows:
        first, *others = (cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True)))
        terminalreporter.write_line("  ".join([first, *others]))


def cells(name: str, k: int, score: Score) -> tuple[str, ...]:
    return (
        name,
        str(k),
        str(score.requests),
        f"{score.equal}/{score.proposals}",
        f"{score.cached}/{score.cached_total}",
        f"{score.blurred}/{score.proposals}",
        str(score.draft_tokens),
        str(score.accepted),
        word(score.counters_equal),
        word(score.output_equal and score.passes_equal),
    )


def word(equal: bool) -> str:
    return "equal" if equal else "DIFFERENT"
