"""The page in a browser: opening, waiting, and checks that apply to all views."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

LOW_CONTRAST = """() => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const blend = (top, below) =>
    top.slice(0, 3).map((c, i) => c * top[3] + below[i] * (1 - top[3]));
  const background = (node) => node
    ? blend(rgba(getComputedStyle(node).backgroundColor), background(node.parentElement))
    : [255, 255, 255];
  const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const luminance = (color) => color.map((v) => linear(v / 255))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const excluded = ':disabled, .visually-hidden, noscript, option';
  const isText = (child) => child.nodeType === 3 && child.textContent.trim();
  const low = [];
  for (const node of document.querySelectorAll('body *')) {
    const hasText = [...node.childNodes].some(isText);
    if (!hasText || !node.checkVisibility() || node.closest(excluded)) continue;
    const below = background(node);
    const ink = blend(rgba(getComputedStyle(node).color), below);
    const [a, b] = [luminance(ink), luminance(below)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) low.push(`${node.className || node.tagName} ${ratio.toFixed(2)}`);
  }
  return [...new Set(low)];
}"""


@contextmanager
def opened(browser: "Browser", server: Any, hash: str = "", **look: Any) -> "Iterator[Page]":
    """Open the page, and check that it logs no problems and sends requests only to its server."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **look})
    page = context.new_page()
    problems: list[str] = []
    page.set_default_timeout(60_000)
    page.on(
        "console",
        lambda message: (
            problems.append(message.text) if message.type in ("error", "warning") else None
        ),
    )
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "request",
        lambda request: (
            problems.append(request.url) if not request.url.startswith(server.url) else None
        ),
    )
    page.goto(server.url + hash)
    until(
        page,
        "document.getElementById('model').textContent !== ''"
        " || !document.getElementById('problem').hidden",
    )
    try:
        yield page
    finally:
        context.close()
    # The browser itself logs refused requests.
    refused = r"Failed to load resource: the server responded with a status of 4\d\d"
    problems = [line for line in problems if not re.match(refused, line)]
    assert [line for line in problems if not line.startswith("data:")] == []


def until(page: "Page", condition: str, seconds: float = 60.0) -> None:
    """Poll a condition: the page's security policy forbids playwright's wait_for_function."""
    end = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < end, f"never true: {condition}"
        page.wait_for_timeout(30)


def fits(page: "Page") -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth <= innerWidth"))


def all_fields_are_named(page: "Page") -> bool:
    fields = page.locator("button, input, select, textarea")
    named = "e => (e.labels?.[0]?.textContent || e.textContent || e.ariaLabel || '').trim() !== ''"
    return all(fields.nth(i).evaluate(named) for i in range(fields.count()))
