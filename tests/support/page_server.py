"""A server for the page without a model: made-up answers with their steps and delays, and everything that goes wrong.

`python -m tests.page_server` serves it for a look. What a prompt begins with chooses the trouble: `401`, `429`, `400`,
`broken` (the stream breaks off), `error` (an error in mid-stream), `differ` (the lanes disagree), `slow`.
"""

import json
import random
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from threading import Event, Thread
from typing import Any

from peagle.server.http.app import CONTENT_SECURITY_POLICY

PAGE = Path(__file__).parents[2] / "peagle" / "server" / "page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
METHODS = ("none", "eagle3", "p-eagle")
SECONDS = {"none": 0.0128, "eagle3": 0.0272, "p-eagle": 0.0192}  # of a step, as on two cores
LIKELY = {"eagle3": 0.80, "p-eagle": 0.77}  # that one more draft is accepted
KEY = "open-sesame"
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

The comprehension keeps letters and digits in lower case, so that spaces, case and punctuation do not matter; the result
is compared with itself in reverse. <b>Both</b> steps take time in proportion to the length of the text, and so does the
memory. For very long texts two indices that walk towards each other would need no copy at all, but the short version is
easier to read & to check.'''


def tokens(text: str) -> Iterator[str]:
    """Pieces of at most five characters, a leading space with its word: tokens enough for a page."""
    word = ""
    for char in text:
        inside = word == " " or (char.isalnum() and word[-1:].isalnum())
        if word and (len(word) == 5 or char in " \n" or not inside):
            yield word
            word = ""
        word += char
    yield word


def steps(method: str, k: int, limit: int, answer: str = ANSWER) -> Iterator[dict[str, Any]]:
    """What each pass of the target brings: the first of them is the prefill, with one token and no draft."""
    left, dice = list(islice(tokens(answer), limit)), random.Random(method)
    drafted = 0
    while left:
        accepted = next((i for i in range(drafted) if dice.random() > LIKELY[method]), drafted)
        texts, left = left[: accepted + 1], left[accepted + 1 :]
        yield {
            "accepted": accepted,
            "drafted": drafted,
            "tokens": len(texts),
            "k": drafted,
            "texts": texts,
        }
        drafted = 0 if method == "none" else k


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "PageServer"

    def do_GET(self) -> None:
        if self.path == "/":
            self.file(PAGE / "index.html")
        elif self.path.startswith("/page/"):
            self.file(PAGE / Path(self.path).name)
        elif not self.allowed():
            self.refuse(401, "missing API key")
        elif self.path == "/v1/models":
            self.json({"object": "list", "data": [{"id": "smollm2-135m", "object": "model"}]})
        elif self.path == "/v1/peagle/status":
            engines = {name: self.server.status(name) for name in self.server.methods}
            self.json(
                {"methods": list(engines), "method": "p-eagle", "k": "auto", "engines": engines}
            )
        else:
            self.refuse(404, "no such page")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(body)
        prompt = body["messages"][0]["content"]
        if not self.allowed() or prompt.startswith("401"):
            self.refuse(401, "missing API key")
        elif prompt.startswith("429"):
            self.refuse(429, "16 requests wait", {"Retry-After": "3"})
        elif prompt.startswith("400"):
            self.refuse(400, "the prompt has 9000 tokens, the model takes 8192")
        else:
            self.stream(body, prompt)

    def stream(self, body: dict[str, Any], prompt: str) -> None:
        asked, method = body["peagle"], body["peagle"]["method"]
        k = 0 if method == "none" else 7 if asked["k"] == "auto" else asked["k"]
        other = prompt.startswith("differ") and method == "eagle3"
        answer = ANSWER.replace("reads the same", "is the same") if other else ANSWER
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        self.server.running[method] += 1
        try:
            self.chunks(
                method,
                list(steps(method, k, body["max_tokens"], answer)),
                prompt,
                body["max_tokens"],
            )
        except OSError:
            self.server.gone.set()  # the client went away
        finally:
            self.server.running[method] -= 1

    def chunks(self, method: str, passes: list[dict[str, Any]], prompt: str, limit: int) -> None:
        self.event(
            {
                "choices": [
                    {
                        "index": 0,
                        "delta": {"role": "assistant", "content": ""},
                        "finish_reason": None,
                    }
                ]
            }
        )
        time.sleep(0.05)
        pace = self.server.pace * (20 if prompt.startswith("slow") else 1)
        for i, told in enumerate(passes):
            if prompt.startswith("broken") and i == 8:
                return
            if prompt.startswith("error") and i == 8:
                self.event(
                    {
                        "error": {
                            "message": "the engine stopped",
                            "type": "server_error",
                            "code": 500,
                        }
                    }
                )
                return
            text = "".join(told["texts"])
            said = (
                told
                if self.server.texts
                else {name: told[name] for name in told if name != "texts"}
            )
            self.event(
                {
                    "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}],
                    "peagle": said,
                }
            )
            time.sleep(SECONDS[method] * pace)
        sent = sum(told["tokens"] for told in passes)
        reason = "length" if sent == limit else "stop"
        self.event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        drafts = sum(told["drafted"] > 0 for told in passes)
        accepted = sum(told["accepted"] for told in passes)
        length = {"mean_acceptance_length": 1 + accepted / max(1, drafts), "num_spec_steps": drafts}
        usage = {"prompt_tokens": 12, "completion_tokens": sent, "total_tokens": 12 + sent}
        self.event({"choices": [], "usage": usage, "metrics": {"speculative_decoding": length}})
        self.wfile.write(b"data: [DONE]\n\n")

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
        told = {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            "Content-Security-Policy": CONTENT_SECURITY_POLICY,
        }
        for name, value in (told | (headers or {})).items():
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
        super().__init__(("127.0.0.1", port), Handler)
        self.methods, self.pace = methods, pace
        self.locked = False  # every request needs KEY
        self.texts = True  # chunks tell the text of each token
        self.requests: list[dict[str, Any]] = []
        self.running = dict.fromkeys(METHODS, 0)
        self.gone = Event()
        Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def status(self, method: str) -> dict[str, Any]:
        busy = self.running[method]
        told = {"k": 0, "k_reason": "", "accepted_per_position": [], "acceptance_length": 1.0}
        if method != "none":
            shares = [round(LIKELY[method] ** (i + 1), 3) for i in range(7)]
            reason = "most tokens a second at 1 request: 155 with K=7, 149 with K=5"
            told = {
                "k": 7,
                "k_reason": reason,
                "accepted_per_position": shares,
                "acceptance_length": 1 + sum(shares),
            }
        return told | {
            "running": busy,
            "waiting": 0,
            "kv_usage": 0.013 * busy,
            "generated_tokens": 4711,
        }


if __name__ == "__main__":
    with PageServer(int(sys.argv[1]) if len(sys.argv) > 1 else 8001) as server:
        print(server.url, flush=True)
        Event().wait()
