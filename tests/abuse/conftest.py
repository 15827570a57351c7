"""A live server for abuse tests; `make test-abuse` runs them, `make test` does not."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.server.live_server import LiveServer, live_server
from tests.support.server.serving import tiny_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def server(folder: Path) -> Iterator[LiveServer]:
    """A new `peagle serve` process for each test, so that tests do not affect each other."""
    with live_server(folder, "--max-batch", "8", "--kv-tokens", "4096") as running:
        yield running
