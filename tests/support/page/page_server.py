"""A server for the page without a model: simulated answers with steps, delays and problems.

`python -m tests.support.page.page_server` serves the page for manual tests. The start of the prompt
chooses a problem: `401`, `429`, `400`, `broken` (the stream breaks off), `error` (an error within
the stream), `differ` (the lanes disagree), `slow`. `scripts` replaces the next answers.
"""

import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from threading import Event, Thread
from typing import Any, TypeAlias

from peagle.server.http.app import CONTENT_SECURITY_POLICY

PAGE = Path(__file__).parents[3] / "peagle" / "server" / "page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
METHODS = ("none", "eagle3", "p-eagle")
STEP_SECONDS = {"none": 0.0128, "eagle3": 0.0272, "p-eagle": 0.0192}  # measured on two cores
# Probability that one more draft is accepted.
ACCEPTANCE = {"eagle3": 0.80, "p-eagle": 0.77, "ngram": 0.3}
PROBLEM_STEP = 8  # `broken` and `error` end the stream at this step
KEY = "open-sesame"
SCRIPT_TIMEOUT = 10.0  # seconds that a script waits for its test
Script: TypeAlias = list["dict[str, Any] | Event"]  # chunks of an answer, and pauses
ANSWER = '''Here is a function that does it:

```python
def is_palindrome(text: str) -> bool:
    """Whether text reads the same backwards, letters and digits only."""
    kept = [c.lower() for c in text if c.isalnum()]
    return kept == kept[::-1]

print(is_palindrome("A man, a plan, a canal: Panama"))  # True
print(is_palindrome("No lemon, no melon"))  # True
print(is_palindrome("Palindrome"))  # False
```

The comprehension keeps letters and digits in lower case, so that spaces, case and punctuation do
not matter; the result is compared with itself in reverse. <b>Both</b> steps take time in
proportion to the length of the text, and so does the memory. For very long texts two indices that
walk towards each other would need no copy at all, but the short version is easier to read & to
check.'''


def tokens(text: str) -> Iterator[str]:
    """Pieces of at most five characters, a leading space with its word."""
    word = ""
    for char in text:
        inside = word == " " or (char.isalnum() and word[-1:].isalnum())
        if word and (len(word) == 5 or char in " \n" or not inside):
            yield word
            word = ""
        word += char
    yield word


def steps(method: str, k: int, limit: int, answer: str = ANSWER) -> Iterator[dict[str, Any]]:
    """The trace of each pass. The first pass is the prefill, with one token and no draft."""
    left = list(islice(tokens(answer), limit))
    random_numbers = random.Random(method)
    drafted = 0
    while left:
        accepted = 0
        while accepted < drafted and random_numbers.random() <= ACCEPTANCE[method]:
            accepted += 1
        texts = left[: accepted + 1]
        left = left[accepted + 1 :]
        yield {
            "accepted": accepted,
            "drafted": drafted,
            "tokens": len(texts),
            "k": drafted,
            "texts": texts,
        }
        drafted = 0 if method == "none" else k


class RouteHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "PageServer"

    def do_GET(self) -> None:
        if self.path == "/":
            self.file(PAGE / "index.html")
        elif self.path.startswith("/page/"):
            self.file(PAGE / self.path.removeprefix("/page/"))
        elif not self.allowed():
            self.refuse(401, "missing API key")
        elif self.path == "/v1/models":
            self.json({"object": "list", "data": [{"id": "smollm2-135m", "object": "model"}]})
        elif self.path == "/v1/peagle/status":
            engines = {name: self.server.status(name) for name in self.server.methods}
            status = {
                "methods": list(engines),
                "method": self.server.method,
                "k": "auto",
                "engines": engines,
            }
            if self.server.learn is not None:
                status["learn"] = self.server.learn
            self.json(status)
        else:
            self.refuse(404, "no such page")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(body)
        prompt = next(m["content"] for m in reversed(body["messages"]) if m["role"] == "user")
        if not self.allowed() or prompt.startswith("401"):
            self.refuse(401, "missing API key")
        elif prompt.startswith("429"):
            self.refuse(429, "16 requests wait", {"Retry-After": "3"})
        elif prompt.startswith("400"):
            self.refuse(400, "the prompt has 9000 tokens, the model takes 8192")
        elif self.server.scripts:
            self.play(self.server.scripts.pop(0))
        else:
            self.stream(body, prompt)

    def play(self, script: Script) -> None:
        """Send the chunks of a script. An event delays those after it until a test sets it."""
        self.start_stream()
        try:
            for chunk in script:
                if isinstance(chunk, Event):
                    chunk.wait(SCRIPT_TIMEOUT)
                else:
                    self.event(chunk)
            self.wfile.write(b"data: [DONE]\n\n")
        except OSError:
            self.server.gone.set()  # the client disconnected

    def start_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True

    def stream(self, body: dict[str, Any], prompt: str) -> None:
        method = body["peagle"]["method"]
        k = body["peagle"].get("k", 0)
        limit = body["max_tokens"]
        differs = prompt.startswith("differ") and method == "eagle3"
        answer = ANSWER.replace("reads the same", "is the same") if differs else ANSWER
        self.start_stream()
        self.server.running[method] += 1
        try:
            trace = list(steps(method, 7 if k == "auto" else k, limit, answer))
            if self.chunks(method, trace, prompt):
                self.ending(trace, limit)
        except OSError:
            self.server.gone.set()  # the client disconnected
        finally:
            self.server.running[method] -= 1

    def chunks(self, method: str, trace: list[dict[str, Any]], prompt: str) -> bool:
        """Send the chunks of an answer. Returns False if a problem ends it."""
        self.delta({"role": "assistant", "content": ""})
        time.sleep(0.05)
        pace = self.server.pace * (20 if prompt.startswith("slow") else 1)
        for i, step in enumerate(trace):
            if prompt.startswith("broken") and i == PROBLEM_STEP:
                return False
            if prompt.startswith("error") and i == PROBLEM_STEP:
                error = {"message": "the engine stopped", "type": "server_error", "code": 500}
                self.event({"error": error})
                return False
            sent = dict(step)
            if not self.server.texts:
                del sent["texts"]
            self.delta({"content": "".join(step["texts"])}, peagle=sent)
            time.sleep(STEP_SECONDS[method] * pace)
        return True

    def ending(self, trace: list[dict[str, Any]], limit: int) -> None:
        tokens = sum(step["tokens"] for step in trace)
        reason = "length" if tokens == limit else "stop"
        self.event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        drafts = sum(step["drafted"] > 0 for step in trace)
        accepted = sum(step["accepted"] for step in trace)
        speculation = {
            "mean_acceptance_length": 1 + accepted / max(1, drafts),
            "num_spec_steps": drafts,
        }
        usage = {
            "prompt_tokens": 12,
            "completion_tokens": tokens,
            "total_tokens": 12 + tokens,
            "prompt_tokens_details": {"cached_tokens": 8},
        }
        metrics = {"speculative_decoding": speculation}
        self.event({"choices": [], "usage": usage, "metrics": metrics})
        self.wfile.write(b"data: [DONE]\n\n")

    def delta(self, delta: dict[str, str], **fields: Any) -> None:
        choice = {"index": 0, "delta": delta, "finish_reason": None}
        self.event({"choices": [choice], **fields})

    def event(self, chunk: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        self.wfile.flush()

    def allowed(self) -> bool:
        return not self.server.locked or self.headers.get("Authorization") == f"Bearer {KEY}"

    def file(self, path: Path) -> None:
        if path.suffix in TYPES and path.is_file():
            self.body(200, path.read_bytes(), TYPES[path.suffix] + "; charset=utf-8")
        else:
            self.refuse(404, "no such file")

    def refuse(self, code: int, message: str, headers: dict[str, str] | None = None) -> None:
        self.json(
            {"error": {"message": message, "type": "error", "param": None, "code": code}},
            code,
            headers,
        )

    def json(self, value: Any, code: int = 200, headers: dict[str, str] | None = None) -> None:
        self.body(code, json.dumps(value).encode(), "application/json", headers)

    def body(
        self, code: int, content: bytes, kind: str, headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(code)
        own = {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            "Content-Security-Policy": CONTENT_SECURITY_POLICY,
        }
        for name, value in (own | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


class PageServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(
        self, port: int = 0, *, methods: tuple[str, ...] = METHODS, pace: float = 1.0
    ) -> None:
        super().__init__(("127.0.0.1", port), RouteHandler)
        self.methods = methods
        self.method = "p-eagle"  # methods of the server
        self.pace = pace  # factor on the time of a step
        self.locked = False  # every request needs KEY
        self.texts = True  # chunks hold the text of each token
        self.learn: dict[str, Any] | None = None  # the field of the status, if the server learns
        self.scripts: list[Script] = []  # the next answers, in order
        self.requests: list[dict[str, Any]] = []
        self.running = Counter[str]()
        self.gone = Event()
        Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def status(self, method: str) -> dict[str, Any]:
        rates = []
        reason = ""
        if method != "none":
            rates = [round(ACCEPTANCE[method] ** (i + 1), 3) for i in range(7)]
            reason = "most tokens a second at 1 request: 155 with K=7, 149 with K=5"
        return {
            "k": len(rates),
            "k_reason": reason,
            "accepted_per_position": rates,
            "acceptance_length": 1 + sum(rates),
            "running": self.running[method],
            "waiting": 0,
            "kv_usage": 0.013 * self.running[method],
            "generated_tokens": 4711,
            "drafts": 1000 + 10 * len(self.requests),
            "accepted_tokens": 2000 + 25 * len(self.requests),
        }


if __name__ == "__main__":
    with PageServer(int(sys.argv[1]) if len(sys.argv) > 1 else 8001) as server:
        print(server.url, flush=True)
        Event().wait()
