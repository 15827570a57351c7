"""Fixtures for tests of the page: Chromium, and a server without a model."""

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.support.page.page_server import PageServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
FAST = 0.15  # factor on the usual time of a step


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install playwright"
    )
    if CHROMIUM is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture
def server() -> Iterator[PageServer]:
    with PageServer(pace=FAST) as server:
        yield server
        server.shutdown()
