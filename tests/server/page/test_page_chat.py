"""The chat view of the page in headless Chromium: simulated, scripted and real answers."""

import json
import re
from threading import Event
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.page.chat_scripts import call, chunk, content, ending, thinking
from tests.support.page.page_browser import LOW_CONTRAST, all_fields_are_named, fits, opened, until
from tests.support.page.page_server import ANSWER, KEY, PageServer, steps

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHAT = "#view=chat"
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]
MARKUP = '<img src=x onerror="document.title=1"><script>document.title=2</script>'


def send(page: "Page", text: str) -> None:
    page.fill("#chat-prompt", text)
    page.press("#chat-prompt", "Enter")


def last_answer(page: "Page") -> Any:
    return page.locator(".answer").last


def wait_until_ended(page: "Page") -> None:
    until(page, "document.getElementById('chat-stop').disabled")


def statistics(page: "Page") -> dict[str, str]:
    """The statistics under the last answer."""
    entries = last_answer(page).locator(".facts div").all()
    return {e.locator("dt").inner_text(): e.locator("dd").inner_text() for e in entries}


def focused(page: "Page") -> str:
    return str(page.evaluate("document.activeElement.id"))


def messages(server: PageServer) -> list[dict[str, Any]]:
    """The messages of the last request."""
    sent: list[dict[str, Any]] = server.requests[-1]["messages"]
    return sent


def test_conversation_of_two_turns(browser: "Browser", server: PageServer) -> None:
    with opened(browser, server, CHAT + "&chat-k=5&chat-system=Be+brief.") as page:
        page.focus("#chat-prompt")
        page.keyboard.type("Write")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("is_palindrome.")
        page.keyboard.press("Enter")
        page.wait_for_selector(".answer[data-state=done]")
        wait_until_ended(page)
        assert last_answer(page).locator(".words").inner_text() == ANSWER
        trace = list(steps("p-eagle", 5, 512))
        drafts = sum(len(step["texts"][: step["accepted"]]) for step in trace)
        assert last_answer(page).locator(".draft").count() == drafts
        verified = [step["accepted"] for step in trace if step["drafted"]]
        figures = statistics(page)
        acceptance_length = 1 + sum(verified) / len(verified)
        assert float(figures["acceptance length"]) == pytest.approx(acceptance_length, abs=0.006)
        assert float(figures["tokens/s"]) > 10
        assert figures["prompt tokens"] == "12, 8 cached"
        assert page.input_value("#chat-prompt") == "" and focused(page) == "chat-prompt"
        assert page.text_content("#announcer") == ANSWER
        send(page, "And in C?")
        until(page, "document.querySelectorAll('.answer[data-state=done]').length === 2")
        assert page.locator(".question .words").all_inner_texts() == [
            "Write\nis_palindrome.",
            "And in C?",
        ]
    assert messages(server) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Write\nis_palindrome."},
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": "And in C?"},
    ]
    body = server.requests[-1]
    assert body["peagle"] == {"method": "p-eagle", "trace": True, "k": 5}
    assert body["stream_options"] == {"include_usage": True} and "tools" not in body


def test_live_figures_and_stop(browser: "Browser", server: PageServer) -> None:
    with opened(browser, server, CHAT) as page:
        send(page, "slow")
        page.wait_for_selector(".answer[data-state=runs] .draft")
        until(page, "!isNaN(parseFloat(document.querySelector('#chat-log dd')?.textContent))")
        assert "acceptance length" in statistics(page) and "prompt tokens" not in statistics(page)
        assert page.is_disabled("#chat-send")
        page.keyboard.press("Escape")
        wait_until_ended(page)
        assert server.gone.wait(60)  # the connection was closed
        assert last_answer(page).get_attribute("data-state") == "stopped"
        kept = last_answer(page).locator(".words").inner_text()
        assert ANSWER.startswith(kept) and page.is_hidden(".retry")
        send(page, "Go on.")
        page.wait_for_selector(".answer[data-state=done]")
    assert messages(server)[1] == {"role": "assistant", "content": kept}


def test_stop_before_the_first_token(browser: "Browser", server: PageServer) -> None:
    server.scripts = [[Event()], [content("Yes."), *ending()]]
    with opened(browser, server, CHAT) as page:
        send(page, "Are you there?")
        until(page, "!document.getElementById('chat-stop').disabled")
        page.click("#chat-stop")
        last_answer(page).get_by_text("Send again").click()
        page.wait_for_selector(".answer[data-state=done]")
        assert page.locator(".answer").count() == 1 and focused(page) == "chat-prompt"
    assert messages(server) == [{"role": "user", "content": "Are you there?"}]


def test_thinking_is_open_while_it_arrives(browser: "Browser", server: PageServer) -> None:
    gate = Event()
    thought = thinking("I", " wonder", ".", accepted=2)
    server.scripts = [[thought, gate, content("Yes."), *ending()]]
    with opened(browser, server, CHAT) as page:
        send(page, "Think.")
        page.wait_for_selector(".thinking[open] .thoughts .draft")
        assert page.inner_text(".thoughts") == "I wonder."
        gate.set()
        page.wait_for_selector(".answer[data-state=done]")
        assert page.is_hidden(".thoughts") and page.inner_text(".words >> nth=-1") == "Yes."
        page.focus(".thinking summary")
        page.keyboard.press("Enter")
        assert page.is_visible(".thoughts")


def test_thinking_folded_by_the_user_stays_folded(browser: "Browser", server: PageServer) -> None:
    gate = Event()
    thoughts = [thinking(" and"), thinking(" so"), thinking(" on")]
    server.scripts = [[thinking("First"), gate, *thoughts, content("Yes."), *ending()]]
    with opened(browser, server, CHAT) as page:
        send(page, "Think.")
        page.click(".thinking[open] summary")
        gate.set()
        page.wait_for_selector(".answer[data-state=done]")
        assert page.is_hidden(".thoughts")
        assert page.text_content(".thoughts") == "First and so on"


def test_tool_calls_and_their_results(browser: "Browser", server: PageServer) -> None:
    calls = [*call(0, "get_weather", '{"city":', '"Paris"}'), *call(1, "get_time", "{}")]
    server.scripts = [
        [thinking("Hm."), content("I look it up."), *calls, *ending("tool_calls")],
        [content("It", " is", " 21", " °C.", accepted=3), *ending()],
    ]
    with opened(browser, server, CHAT + "&chat-choice=required") as page:
        page.click("#chat-settings summary")
        page.fill("#chat-tools", json.dumps(TOOLS))
        assert page.inner_text("#chat-summary").endswith("1 tool")
        send(page, "How is the weather?")
        page.get_by_label("Result of call 1, get_weather").wait_for()
        assert page.locator(".call pre").first.is_hidden()  # folded
        page.focus(".call summary")
        page.keyboard.press("Enter")
        assert page.locator(".call pre").first.inner_text() == '{\n  "city": "Paris"\n}'
        send(page, "Well?")  # not before the results
        assert page.inner_text("#chat-problem").startswith("Type the results of the calls")
        page.keyboard.type("21 °C")
        page.keyboard.press("Enter")  # the second result is missing
        page.keyboard.type("12:00")
        page.keyboard.press("Enter")
        until(page, "document.querySelectorAll('.answer[data-state=done]').length === 2")
        assert last_answer(page).locator(".words").inner_text() == "It is 21 °C."
        assert page.is_hidden(".results button") and page.is_hidden("#chat-problem")
        assert page.input_value("#chat-prompt") == "Well?" and focused(page) == "chat-prompt"
    question, answer, *results = messages(server)
    assert question["content"] == "How is the weather?"
    assert answer == {
        "role": "assistant",
        "content": "I look it up.",
        "reasoning_content": "Hm.",
        "tool_calls": [
            {
                "id": "call_get_weather",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city":"Paris"}'},
            },
            {
                "id": "call_get_time",
                "type": "function",
                "function": {"name": "get_time", "arguments": "{}"},
            },
        ],
    }
    assert results == [
        {"role": "tool", "tool_call_id": "call_get_weather", "content": "21 °C"},
        {"role": "tool", "tool_call_id": "call_get_time", "content": "12:00"},
    ]
    assert server.requests[-1]["tools"] == TOOLS
    assert server.requests[-1]["tool_choice"] == "required"


def test_call_at_the_limit_of_tokens(browser: "Browser", server: PageServer) -> None:
    """A call that is cut off has no result, and is not sent with the next request."""
    calls = [*call(0, "get_weather", '{"city": "Paris"}'), *call(1, "get_time", '{"city": "P')]
    server.scripts = [[*calls, *ending("length")], [content("Yes."), *ending()]]
    with opened(browser, server, CHAT) as page:
        send(page, "How is the weather?")
        page.get_by_label("Result of get_weather").fill("21 °C")
        assert page.locator(".call").count() == 2
        assert page.locator(".result textarea:visible").count() == 1
        page.get_by_text("Continue").click()
        until(page, "document.querySelectorAll('.answer[data-state=done]').length === 2")
    _, answer, result = messages(server)
    assert [entry["id"] for entry in answer["tool_calls"]] == ["call_get_weather"]
    assert answer["content"] is None and result["tool_call_id"] == "call_get_weather"


def test_answers_never_become_markup(browser: "Browser", server: PageServer) -> None:
    arguments = json.dumps({"city": MARKUP})
    server.scripts = [
        [thinking(MARKUP), content(MARKUP), *call(0, MARKUP, arguments), *ending()],
        [content("ok"), {"error": {"message": MARKUP}}],
    ]
    with opened(browser, server, CHAT) as page:
        title = page.title()
        send(page, MARKUP)
        page.locator(".result textarea").fill(MARKUP)
        page.press(".result textarea", "Enter")
        page.wait_for_selector(".answer[data-state=failed]")
        shown = page.text_content("#chat-log")
        assert shown.count(MARKUP) == 6  # question, thinking, text, call, label, error
        assert "<img" in page.text_content(".call pre")
        assert page.locator("#chat-log :is(img, script)").count() == 0 and page.title() == title


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("400", "The prompt has 9000 tokens, the model takes 8192."),
        ("broken", "The stream broke off."),
    ],
)
def test_conversation_survives_errors(
    browser: "Browser", server: PageServer, prompt: str, words: str
) -> None:
    with opened(browser, server, CHAT + "&chat-tokens=40") as page:
        send(page, "Hi.")
        page.wait_for_selector(".answer[data-state=done]")
        send(page, prompt)
        page.wait_for_selector(".retry:not([hidden])")
        assert last_answer(page).locator(".problem").inner_text() == words
        before = messages(server)
        assert [message["role"] for message in before] == ["user", "assistant", "user"]
        last_answer(page).get_by_text("Send again").click()
        page.wait_for_selector(".retry:not([hidden])")
        assert messages(server) == before and len(server.requests) == 3
        last_answer(page).get_by_text("Edit the message").click()
        assert page.input_value("#chat-prompt") == prompt and focused(page) == "chat-prompt"
        assert page.locator(".question").count() == 1
        send(page, "Now a good one.")
        until(page, "document.querySelectorAll('.answer[data-state=done]').length === 2")
        assert last_answer(page).locator(".note").inner_text() == "Cut off at the limit of tokens."
    assert [m["content"] for m in messages(server)] == [
        *(message["content"] for message in before[:2]),
        "Now a good one.",
    ]


def test_key_is_requested(browser: "Browser", server: PageServer) -> None:
    server.locked = True
    with opened(browser, server, CHAT) as page:
        send(page, "Hi.")
        page.wait_for_selector(".answer[data-state=failed]")
        assert "requires an API key" in last_answer(page).locator(".problem").inner_text()
        assert focused(page) == "chat-key"
        page.keyboard.type(KEY)
        page.get_by_text("Send again").click()
        page.wait_for_selector(".answer[data-state=done]")
        until(page, "document.getElementById('model').textContent !== ''")
        assert KEY not in page.url and page.input_value("#key") == KEY


def test_new_conversation(browser: "Browser", server: PageServer) -> None:
    server.method = "eagle3"
    with opened(browser, server, CHAT) as page:
        until(page, "document.getElementById('chat-method').value === 'eagle3'")
        send(page, "slow")
        page.wait_for_selector(".answer[data-state=runs] .token")
        page.click("#chat-new")
        assert server.gone.wait(60)
        assert page.locator("#chat-log > *").count() == 0 and focused(page) == "chat-prompt"
        send(page, "Hi.")
        page.wait_for_selector(".answer[data-state=done]")
    assert messages(server) == [{"role": "user", "content": "Hi."}]
    assert server.requests[-1]["peagle"]["method"] == "eagle3"


FUNCTIONS = """async () => {
  const { Answer } = await import('/page/chat/answer.js');
  const { parseTools } = await import('/page/chat/tools.js');
  const parts = (delta, texts, accepted) => {
    const answer = new Answer('p-eagle');
    answer.add(1, {
      choices: [{delta}],
      peagle: {texts, accepted, drafted: 7, tokens: texts.length},
    });
    const shown = ({ texts, rest, accepted }) => rest || [texts, accepted];
    return [answer.reasoning.map(shown), answer.content.map(shown)];
  };
  const check = (text) => {
    try {
      return parseTools(text).length;
    } catch (error) {
      return error.message;
    }
  };
  const twoChunks = new Answer('p-eagle'); // of one step, in which the thinking ends
  const step = {texts: ['a', '</think>', 'b'], accepted: 2, drafted: 7, tokens: 3};
  twoChunks.add(1, {
    choices: [{delta: {reasoning_content: 'a', reasoning: 'a'}}], peagle: step,
  });
  twoChunks.add(1, {choices: [{delta: {content: 'b'}}]});
  const { totals, text } = twoChunks.record;
  const named = (name) => ({type: 'function', function: {name}});
  return {
    parts: [
      parts({content: 'Hi you'}, ['Hi', ' you', '<end>'], 2),
      parts({content: 'Café'}, ['Caf', '\\ufffd', '\\ufffd'], 2),
      parts({content: 'Hi'}, ['</think>', 'Hi'], 1),
      parts({content: '<tool_call>{no'}, ['no'], 0),
      parts({reasoning_content: 'a', content: 'b'}, ['a', '</think>', 'b'], 2),
      parts({content: ''}, ['<tool_call>'], 0),
      parts({reasoning: 'Hm', content: null}, ['Hm'], 1),
    ],
    twoChunks: [totals.tokens, totals.passes, text, twoChunks.message],
    tools: [
      '', ' []', JSON.stringify([named('a'), named('b-2')]), '{}', '[1]', '[{"type": "function"}]',
      JSON.stringify([named('a'), named('a b')]), JSON.stringify([named('a'), named('a')]),
      JSON.stringify([{type: 'function', function: {name: 'a', parameters: []}}]),
    ].map(check),
  };
}"""


def test_parts_and_tools(browser: "Browser", server: PageServer) -> None:
    with opened(browser, server, CHAT) as page:
        results = page.evaluate(FUNCTIONS)
    assert results["parts"] == [
        [[], [[["Hi", " you", ""], 2]]],
        [[], [[["Caf", "", "é"], 2]]],
        [[], [[["", "Hi"], 1]]],
        [[], ["<tool_call>{no"]],  # text that the parser held back does not belong to this step
        [["a"], ["b"]],
        [[], []],
        [[[["Hm"], 1]], []],
    ]
    message = {"role": "assistant", "content": "b", "reasoning_content": "a"}
    assert results["twoChunks"] == [3, 1, "ab", message]
    assert results["tools"] == [
        0,
        0,
        2,
        "The tools must be a list: [{...}, ...].",
        'Tool 1 must be {"type": "function", "function": {...}}.',
        'Tool 1 must be {"type": "function", "function": {...}}.',
        "Tool 2 needs a function.name of letters, digits, _ and -.",
        "Two tools have the name a: rename one.",
        "Tool 1: the parameters of a must be a JSON schema, {...}.",
    ]


def test_invalid_tools_are_not_sent(browser: "Browser", server: PageServer) -> None:
    with opened(browser, server, CHAT + "&chat-tools=[{") as page:
        send(page, "Hi.")
        assert page.inner_text("#chat-tools-problem").startswith("The tools are not valid JSON:")
        assert focused(page) == "chat-tools" and page.input_value("#chat-prompt") == "Hi."
        assert page.get_attribute("#chat-tools", "aria-invalid") == "true"
        page.click("#chat-example")
        assert page.is_hidden("#chat-tools-problem")
        page.press("#chat-prompt", "Enter")
        page.wait_for_selector(".answer[data-state=done]")
    assert [tool["function"]["name"] for tool in server.requests[0]["tools"]] == ["get_weather"]


def test_views_share_the_address(browser: "Browser", server: PageServer) -> None:
    server.methods = ("p-eagle", "none", "ngram")
    with opened(browser, server, "#tokens=40&chat-method=ngram") as page:
        page.focus("#race-tab")
        page.keyboard.press("ArrowRight")
        assert focused(page) == "chat-tab" and page.is_hidden("#race-view")
        until(page, "location.hash.includes('view=chat')")
        until(page, "document.getElementById('chat-method').value === 'ngram'")
        page.click("#chat-settings summary")
        assert page.locator("#chat-method option").all_inner_texts() == [
            "P-EAGLE",
            "Plain decoding",
            "N-gram",
        ]
        page.select_option("#chat-method", "none")
        page.fill("#chat-temperature", "0.7")
        until(page, "location.hash.includes('chat-temperature=0.7')")
        assert "tokens=40" in page.url and "chat-method=none" in page.url
        page.keyboard.press("Control+Enter")  # must not start a race
        page.reload()
        until(page, "document.getElementById('model').textContent !== ''")
        assert page.inner_text("#chat-summary").startswith("Plain decoding, temperature 0.7")
        send(page, "Hi.")
        page.wait_for_selector(".answer[data-state=done]")
        assert page.locator(".answer .draft").count() == 0
        page.focus("#chat-tab")
        page.keyboard.press("ArrowLeft")
        assert page.is_visible("#run") and page.input_value("#tokens") == "40"
    assert [body["peagle"] for body in server.requests] == [{"method": "none", "trace": True}]


def test_keyboard_reaches_everything(browser: "Browser", server: PageServer) -> None:
    server.scripts = [[thinking("Hm."), *call(0, "get_weather", "{}"), *ending()]]
    with opened(browser, server, CHAT) as page:
        send(page, "Hi.")
        page.wait_for_selector(".results button:not([hidden])")
        page.focus("#chat-tab")
        reached = []
        for _ in range(8):
            page.keyboard.press("Tab")
            name, outline = page.evaluate(
                "[document.activeElement.id || document.activeElement.textContent,"
                " getComputedStyle(document.activeElement).outlineStyle]"
            )
            assert outline == "solid", name  # the focus is visible
            reached.append(re.sub(r"result-\d+", "result", name))
        assert reached == [
            page.text_content("#chat-settings summary"),
            "Thinking",
            "Call of get_weather",
            "result",
            "Continue",
            "chat-prompt",
            "chat-send",
            "chat-new",
        ]
        page.focus("#chat-settings summary")
        page.keyboard.press("Shift+Tab")
        assert focused(page) == "chat-tab"


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_layout_and_contrast(
    browser: "Browser", server: PageServer, scheme: str, width: int
) -> None:
    long = "x" * 300
    calls = call(0, "get_" + "weather" * 8, json.dumps({"city": long}))
    server.scripts = [
        [thinking(long), content(long, accepted=1), chunk({"content": "?"}), *calls, *ending()]
    ]
    look = {"viewport": {"width": width, "height": 844}, "color_scheme": scheme}
    with opened(browser, server, CHAT, **look) as page:
        page.click("#chat-settings summary")
        assert fits(page)
        page.fill("#chat-tools", "[" + long)
        assert page.evaluate(LOW_CONTRAST) == [] and fits(page)
        page.click("#chat-example")
        send(page, "Hi " + long)
        page.wait_for_selector(".results button:not([hidden])")
        page.locator(".answer summary").first.click()
        page.locator(".answer summary").last.click()
        assert page.locator(".call pre").is_visible() and fits(page)
        assert page.evaluate(LOW_CONTRAST) == []
        assert all_fields_are_named(page)
        assert page.locator("[aria-live] .token, [role=status] .token").count() == 0


def test_page_follows_the_answer(browser: "Browser", server: PageServer) -> None:
    gate = Event()
    lines = [content(f"line {i}\n") for i in range(80)]
    server.scripts = [[*lines, gate, *lines, *ending()]]
    at_end = "innerHeight + scrollY >= document.documentElement.scrollHeight - 2"
    with opened(browser, server, CHAT) as page:
        send(page, "Hi.")
        until(page, f"document.querySelectorAll('.answer .token').length === 80 && {at_end}")
        page.evaluate("scrollTo(0, 0)")
        gate.set()
        page.wait_for_selector(".answer[data-state=done]")
        # the scroll position of a user who reads above is kept
        assert page.evaluate("scrollY") == 0


def test_real_server(browser: "Browser") -> None:
    """Two turns with the engine of a real server."""
    from tests.support.server.serving import make_backend, running

    view = CHAT + "&chat-tokens=24"
    with (
        running(make_backend()) as (_, url),
        opened(browser, SimpleNamespace(url=url), view) as page,
    ):
        for turn in (1, 2):
            send(page, "w6 w9 w30")
            until(page, f"document.querySelectorAll('.answer[data-state=done]').length === {turn}")
        for answer in page.locator(".answer").all():
            words = answer.locator(".words").inner_text().split()
            assert len(words) > 5 and all(word.startswith("w") for word in words)
            assert answer.locator(".token").count() >= len(words)
        tokens, cached = statistics(page)["prompt tokens"].split(", ")
        assert int(tokens) > 20 and cached.endswith(" cached")
