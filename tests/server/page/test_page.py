"""The page at / in headless Chromium, mostly against tests/support/page/page_server.py."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import pytest

from tests.support.page.page_browser import LOW_CONTRAST, all_fields_are_named, fits, opened, until
from tests.support.page.page_server import ANSWER, KEY, METHODS, PAGE, PageServer, steps, tokens

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = {"p-eagle": "P-EAGLE", "eagle3": "EAGLE-3", "none": "Plain decoding"}


def ask(page: "Page", prompt: str) -> None:
    page.fill("#prompt", prompt)
    page.click("#run")


def wait_until_ended(page: "Page") -> None:
    """Wait for the end of the race, and of the replay if one follows."""
    until(
        page, "!document.getElementById('run').disabled && document.getElementById('stop').disabled"
    )


def lane(page: "Page", method: str) -> Any:
    return page.locator(f".lane.m-{method}")


def recorded(server: PageServer) -> list[dict[str, Any]]:
    """The requests, without those that only warm up an engine."""
    return [body for body in server.requests if body["messages"][0]["content"] != "Count to 50."]


def test_traces_are_consistent() -> None:
    for method in METHODS:
        trace = list(steps(method, 7, 10_000))
        assert "".join(text for step in trace for text in step["texts"]) == ANSWER
        assert all(step["tokens"] <= step["accepted"] + 1 <= step["drafted"] + 1 for step in trace)
    assert max(map(len, tokens(ANSWER))) <= 5


def test_model_text_never_becomes_markup() -> None:
    scripts = "".join(path.read_text(encoding="utf-8") for path in PAGE.rglob("*.js"))
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", scripts
    )
    html = (PAGE / "index.html").read_text(encoding="utf-8")
    assert not re.search(
        r"https?://(?!www\.w3\.org)",
        html + scripts + (PAGE / "style.css").read_text(encoding="utf-8"),
    )
    assert (
        "localStorage" not in scripts
        and "sessionStorage" not in scripts
        and "cookie" not in scripts
    )


def test_sequential_race(browser: "Browser", server: PageServer) -> None:
    with opened(browser, server) as page:
        assert "smollm2-135m" in page.inner_text(".site")
        ask(page, "Write is_palindrome.")
        page.wait_for_selector("#result:not([hidden])")
        assert "Identical answers." in page.inner_text(
            "#result"
        ) and "plain decoding" in page.inner_text("#result")
        page.wait_for_selector("body.replaying")  # the replay follows a sequential race
        assert page.inner_text("#race-note").startswith(
            "Recorded in turns, each lane with the machine to itself"
        )
        wait_until_ended(page)
        for method in METHODS:
            words = lane(page, method).locator(".text").inner_text()
            assert words == "".join(list(tokens(ANSWER))[:160]), method
            assert float(lane(page, method).locator(".speed").inner_text()) > 10
        assert "× plain" in lane(page, "p-eagle").locator(".ratio").inner_text()
        assert lane(page, "none").locator(".draft").count() == 0
        drafts = sum(step["accepted"] for step in steps("p-eagle", 7, 160))
        # the token limit may cut the last step
        assert abs(lane(page, "p-eagle").locator(".draft").count() - drafts) <= 7
        assert lane(page, "p-eagle").locator(".positions li").count() == 7
        assert (
            lane(page, "p-eagle").locator(".k").inner_text().startswith("K 7: most tokens a second")
        )
        assert "KV cache" in lane(page, "eagle3").locator(".server").inner_text()
        assert "Identical answers" in page.text_content("#announcer")
    bodies = recorded(server)
    assert [body["peagle"]["method"] for body in bodies] == ["none", "eagle3", "p-eagle"]
    assert len({body["seed"] for body in bodies}) == 1 and bodies[2]["peagle"]["k"] == "auto"


def test_concurrent_race(browser: "Browser", server: PageServer) -> None:
    with opened(browser, server, "#mode=together&k=4&temperature=0.7&tokens=60") as page:
        ask(page, "slow")
        until(page, "document.querySelectorAll('.lane[data-state=runs] .token').length > 3")
        assert page.locator(".lane[data-state=runs]").count() == 3
        page.wait_for_selector("#result:not([hidden])")
        assert "together, sharing the machine; K 4" in page.inner_text("#race-note").replace(
            ", after a short warm-up", ""
        )
        assert page.locator("body.replaying").count() == 0
        page.click("#replay")
        page.wait_for_selector("body.replaying")
        page.keyboard.press("Escape")
        wait_until_ended(page)
        assert lane(page, "none").locator(".token").count() == 60
    assert {body["temperature"] for body in recorded(server)} == {0.7}


def test_stop_and_keyboard(browser: "Browser", server: PageServer) -> None:
    with opened(browser, server) as page:
        page.focus("#prompt")
        page.keyboard.press("Control+A")
        page.keyboard.type("slow")
        page.keyboard.press("Control+Enter")
        page.wait_for_selector(".lane.m-none .token")
        page.keyboard.press("Escape")
        wait_until_ended(page)
        assert server.gone.wait(60)  # the connection was closed
        assert [lane(page, method).get_attribute("data-state") for method in METHODS] == [
            "stopped"
        ] * 3
        assert page.inner_text("#race-note") == "Stopped." and page.locator("#result").is_hidden()
        page.keyboard.press("Control+Enter")
        page.wait_for_selector(".lane.m-none[data-state=runs] .token")
        page.click("#stop")
        wait_until_ended(page)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("429", "Not now, 16 requests wait: try again in 3 s."),
        ("400", "The prompt has 9000 tokens, the model takes 8192."),
        ("broken", "The stream broke off. 8 tokens had arrived."),
        ("error", "The engine stopped. 8 tokens had arrived."),
    ],
)
def test_problems_are_shown(
    browser: "Browser", server: PageServer, prompt: str, words: str
) -> None:
    with opened(browser, server, "#lanes=none") as page:
        ask(page, prompt)
        lane(page, "none").locator(".problem").wait_for()
        wait_until_ended(page)
        assert lane(page, "none").locator(".problem").inner_text() == words
        assert lane(page, "none").get_attribute("data-state") == "failed"
        assert (
            words.startswith(page.inner_text("#problem"))
            and page.locator("#replay-controls").is_hidden()
        )
        ask(page, "Now a good one.")  # and the page continues to work
        page.wait_for_selector("#result:not([hidden])")


def test_key_is_requested_and_not_stored(browser: "Browser", server: PageServer) -> None:
    server.locked = True
    with opened(browser, server) as page:
        page.wait_for_selector("#problem:not([hidden])")
        ask(page, "Hi.")
        wait_until_ended(page)
        assert "requires an API key" in lane(page, "p-eagle").locator(".problem").inner_text()
        page.fill("#key", KEY)
        page.keyboard.press("Control+Enter")
        page.wait_for_selector("#result:not([hidden])")
        page.wait_for_timeout(300)
        assert KEY not in page.url and "prompt=Hi." in page.url
        page.reload()
        assert page.input_value("#key") == "" and page.input_value("#prompt") == "Hi."


def test_settings_are_in_the_address(browser: "Browser", server: PageServer) -> None:
    with opened(
        browser, server, "#k=5&tokens=40&lanes=p-eagle,none&prompt=Count+%26+say%23&temperature=x"
    ) as page:
        assert page.input_value("#prompt") == "Count & say#" and page.input_value("#k") == "5"
        assert page.input_value("#temperature") == "0" and not page.is_checked("[value=eagle3]")
        assert lane(page, "eagle3").is_hidden() and lane(page, "p-eagle").is_visible()
        page.click("summary")
        page.fill("#tokens", "64")
        page.check("[value=together]")
        until(page, "location.hash.includes('together')")
        params = parse_qs(page.url.partition("#")[2])
        assert params["tokens"] == ["64"] and params["lanes"] == ["p-eagle,none"]
        assert "temperature" not in params


def test_a_race_of_one_method(browser: "Browser", server: PageServer) -> None:
    server.methods = ("p-eagle",)
    with opened(browser, server) as page:
        until(page, "document.querySelector('[value=none]').disabled")
        assert lane(page, "none").is_hidden()
        ask(page, "Hi.")
        page.wait_for_selector("#result:not([hidden])")
        assert page.inner_text("#result").startswith("P-EAGLE: 160 tokens at")


def test_answers_that_differ_and_tokens_without_texts(
    browser: "Browser", server: PageServer
) -> None:
    server.texts = False
    with opened(browser, server) as page:
        ask(page, "differ")
        page.wait_for_selector("#result:not([hidden])")
        assert re.search(r"The answers differ after \d+ characters", page.inner_text("#result"))
        assert page.locator("#estimated").is_visible()
        wait_until_ended(page)
        assert lane(page, "p-eagle").locator(".text").inner_text() == "".join(
            list(tokens(ANSWER))[:160]
        )


RECORD_FUNCTIONS = """async () => {
  const { Record, alignTexts, fastestMethod, splitText, verdict } = await import('/page/record.js');
  const record = (method, times, text = 'ab', complete = true) => {
    const made = new Record(method);
    const chunk = {choices: [{delta: {content: text}}], peagle: {tokens: 2, texts: [...text]}};
    for (const t of times) made.add(t, chunk);
    if (complete) made.ended = times.at(-1); else made.problem = 'no';
    return made;
  };
  const fast = record('p-eagle', [1, 2, 3]);
  const level = record('eagle3', [1, 2, 3.04]);
  const slow = record('none', [1, 3, 5]);
  const counted = new Record('p-eagle'); // a server that sends usage instead of steps
  for (const sum of [1, 4, 4, 9]) {
    const usage = {completion_tokens: sum};
    counted.add(sum, {choices: [{delta: {content: 'x'}}], usage});
  }
  return {
    counted: [counted.totals.tokens, counted.estimated],
    aligned: [
      alignTexts(['Caf', '\\ufffd', '\\ufffd', ' au', '<end>'], 'Café au'),
      alignTexts(['\\ufffd', ' b'], 'é b'), alignTexts(['x'], 'yz'), alignTexts(['<end>'], ''),
    ],
    split: [splitText('Hello world, you', 2), splitText('a', 3).join(''), splitText('', 1)],
    verdicts: [
      [fast, slow], [fast, level, slow], [fast, record('none', [1, 3], 'ac')],
      [fast, record('none', [1], 'ab', false)], [record('none', [1])], [record('none', [])],
    ].map(verdict),
    fastest: [[fast, slow], [fast, level, slow], [fast]].map(fastestMethod),
  };
}"""


def test_records_and_verdicts(browser: "Browser", server: PageServer) -> None:
    with opened(browser, server) as page:
        results = page.evaluate(RECORD_FUNCTIONS)
    assert results["aligned"] == [["Caf", "", "é", " au", ""], ["é", " b"], ["yz"], [""]]
    assert results["counted"] == [10, True]  # A chunk with text counts as at least one token.
    assert results["split"] == [["Hello world", ", you"], "a", [""]]
    assert results["verdicts"] == [
        "✓ Identical answers. P-EAGLE won: 2.0 tokens/s, 2.00× plain decoding.",
        "✓ Identical answers. P-EAGLE and EAGLE-3 are level at 2.0 tokens/s, 2.00× plain decoding.",
        "The answers differ after 1 character: near ties may flip unless the server runs with"
        " --exact. P-EAGLE won: 2.0 tokens/s, 2.00× plain decoding.",
        "P-EAGLE: 6 tokens at 2.0 tokens/s (of the lanes that finished).",
        "The answer is too short to measure a speed.",
        "",
    ]
    assert results["fastest"] == ["p-eagle", None, None]


@pytest.mark.parametrize(("scheme", "width"), [("light", 390), ("dark", 390), ("light", 320)])
def test_layout_on_a_phone(browser: "Browser", server: PageServer, scheme: str, width: int) -> None:
    phone = {"viewport": {"width": width, "height": 844}, "color_scheme": scheme, "has_touch": True}
    with opened(browser, server, **phone) as page:
        assert fits(page)
        ask(page, "Hi " + "and a very long word: " + "x" * 300)
        page.wait_for_selector(".token")
        assert fits(page)
        wait_until_ended(page)
        assert fits(page)
        left = [lane(page, method).bounding_box()["x"] for method in METHODS]
        assert len(set(left)) == 1  # stacked
        assert page.locator("#replay-controls").is_visible()


def test_reduced_motion_has_no_automatic_replay(browser: "Browser", server: PageServer) -> None:
    with opened(browser, server, reduced_motion="reduce") as page:
        ask(page, "Hi.")
        page.wait_for_selector("#result:not([hidden])")
        assert page.locator("body.replaying").count() == 0 and page.is_enabled("#run")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_and_names(browser: "Browser", server: PageServer, scheme: str) -> None:
    with opened(browser, server, color_scheme=scheme, reduced_motion="reduce") as page:
        page.click("summary")
        ask(page, "Hi.")
        page.wait_for_selector("#result:not([hidden])")
        assert page.evaluate(LOW_CONTRAST) == []
        assert all_fields_are_named(page)
        # screen readers do not announce single tokens
        assert page.locator("[aria-live] .token, [role=status] .token").count() == 0


def test_every_file_is_packaged() -> None:
    pyproject = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    assert '"server/page/**/*"' in pyproject
    index = PAGE / "index.html"
    links = re.findall(r'(?:href|src)="page/([\w./]+)"', index.read_text(encoding="utf-8"))
    linked = {index} | {PAGE / link for link in links}
    for script in PAGE.rglob("*.js"):
        imports = re.findall(r'(?:from|import) "([\w./]+)"', script.read_text(encoding="utf-8"))
        linked |= {(script.parent / path).resolve() for path in imports}
    assert linked == {path for path in PAGE.rglob("*") if path.is_file()}


def test_real_server(browser: "Browser") -> None:
    """Every lane streams the answer of the engines of a real server."""
    from tests.support.server.serving import make_backend, running

    with running(make_backend()) as (_, url), opened(browser, SimpleNamespace(url=url)) as page:
        assert page.inner_text("#model") == "· tiny"
        ask(page, "w6 w9 w30")
        wait_until_ended(page)
        words = {
            method: lane(page, method).locator(".text").inner_text().split() for method in NAMES
        }
        assert len(words["none"]) > 5 and all(word.startswith("w") for word in words["none"])
        assert words["p-eagle"] == words["eagle3"] == words["none"]
        assert not page.is_visible("#problem")


LEARN = {
    "current": {"number": 2, "since": 1.0, "reason": "it won"},
    "engines": {"engine": 2},
    "failure": None,
    "store": {"documents": 1234, "tokens": 56789, "dropped": 0, "segments": 1, "bytes": 1000},
    "trainer": {"state": "training", "step": 3, "steps": 40},
    "acceptance_lengths": {"0": 2.5, "2": 3.25},
    "versions": [
        {
            "number": 2,
            "state": "promoted",
            "documents": 64,
            "held_back": {"before": 2.4, "after": 3.1},
            "acceptance_length": 3.25,
        }
    ],
    "events": [{"time": 1.0, "kind": "promoted", "text": "<b>version 2</b>", "version": 2}],
}


def test_learning_panel(browser: "Browser", server: PageServer) -> None:
    with opened(browser, server) as page:
        assert not page.locator("#learn").is_visible()
    server.learn = LEARN
    with opened(browser, server) as page:
        page.wait_for_selector("#learn:not([hidden])")
        facts = page.inner_text("#learn-facts")
        assert "1,234" in facts and "training, step 3 of 40" in facts
        rows = page.locator("#learn-versions tr")
        assert rows.count() == 2
        assert "2, in use" in rows.nth(0).inner_text() and "2.40 → 3.10" in rows.nth(0).inner_text()
        assert "2.50" in rows.nth(1).inner_text()
        assert "<b>version 2</b>" in page.inner_text("#learn-events")
        assert not page.locator("#learn-problem").is_visible()
        assert not page.evaluate(LOW_CONTRAST)
    server.learn = LEARN | {"failure": "the disk is full"}
    with opened(browser, server) as page:
        page.wait_for_selector("#learn-problem:not([hidden])")
        assert page.inner_text("#learn-problem") == "the disk is full"
