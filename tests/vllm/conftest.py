"""Collect the score of every case, and print a table at the end."""

import pytest
from parity_replay import Score

HEAD = [
    "case",
    "K",
    "requests",
    "proposals",
    "cut as vLLM",
    "step loop",
    "control",
    "draft tokens",
    "accepted",
    "counters",
    "output",
]
NOTES = (
    "proposals: those of the cache-free reference; step loop: those of the cached loop",
    "cut as vLLM: at the end of each chunk of a prompt, the reference embeds the prompt's last"
    " token, as vLLM 0.32.0 does",
    "control: the number that would be equal with the drafter's hidden states one position late",
)
SCORES = pytest.StashKey[dict[str, Score]]()
FIGURES = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SCORES] = {}
    config.stash[FIGURES] = []


@pytest.fixture
def scores(request: pytest.FixtureRequest) -> dict[str, Score]:
    """Scores by case name, in the order of execution."""
    return request.config.stash[SCORES]


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> list[str]:
    """Lines that are printed at the end."""
    return request.config.stash[FIGURES]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for line in config.stash[FIGURES]:
        terminalreporter.write_line(line)
    if not (scores := config.stash[SCORES]):
        return
    rows = [HEAD, *(cells(name, score) for name, score in scores.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    terminalreporter.section("peagle against vLLM: equal / all")
    for name, *others in rows:
        numbers = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        terminalreporter.write_line("  ".join([name.ljust(widths[0]), *numbers]))
    for note in NOTES:
        terminalreporter.write_line(note)


def cells(name: str, score: Score) -> list[str]:
    return [
        name,
        str(score.k),
        str(score.requests),
        f"{score.equal}/{score.proposals}",
        f"{score.embedded}/{score.proposals}",
        f"{score.looped}/{score.loop_total}",
        f"{score.late}/{score.proposals}",
        str(score.draft_tokens),
        str(score.accepted),
        "equal" if score.counters_equal else "differ",
        "equal" if score.output_equal else "differs",
    ]
