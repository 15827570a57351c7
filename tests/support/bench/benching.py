"""A tiny chat pair, jobs, and an OpenAI-compatible server for the tests of benchmarks."""

import json
import threading
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from peagle.bench.load.jobs import LoadJob
from peagle.catalog.pair import DrafterSource, Pair, TargetSource
from peagle.core import Method
from peagle.data.bench import Task
from peagle.drafter.formats import compact
from peagle.loaded import LoadedPair
from peagle.target import Target
from tests.support.models.tiny_models import MASK, make_drafter, make_target

PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


def chatty() -> PreTrainedTokenizerFast:
    """A chat tokenizer, in which token 17 is w17, and messages start with <user>."""
    vocab = {f"w{i}": i for i in range(94) if i != MASK} | {"<user>": 94, "<unk>": 95}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="w1")
    tokenizer.chat_template = "{% for m in messages %}<user> {{ m['content'] }} {% endfor %}"
    return tokenizer


@cache
def tiny_pair() -> LoadedPair:
    plain = make_target()
    target = Target(plain.model, chatty(), "tiny")
    drafters: dict[Method, Any] = {m: make_drafter(target, m, 1) for m in ("p-eagle", "eagle3")}
    sources: dict[Method, DrafterSource] = {method: DrafterSource() for method in drafters}
    return LoadedPair(Pair("tiny", TargetSource(()), sources, k=3), target, drafters)


def tiny_folder(root: Path) -> Path:
    """Save the tiny pair: a target, and its drafters in separate folders."""
    pair = tiny_pair()
    pair.target.model.save_pretrained(root / "target")
    chatty().save_pretrained(root / "target")
    named = Target(pair.target.model, pair.target.tokenizer, str(root / "target"))
    for method in ("p-eagle", "eagle3"):
        compact.save(pair.drafter(method), root / method, named)
    return root


def some_jobs(
    count: int, turns: int = 1, max_tokens: int = 12, ignore_eos: bool = True
) -> list[LoadJob]:
    turns_of_job = [
        tuple(f"w{6 + (7 * i + 3 * t) % 80} w{9 + i} w{30 + t}" for t in range(turns))
        for i in range(count)
    ]
    return [LoadJob(Task(str(i), turns_of_job[i]), i, max_tokens, ignore_eos) for i in range(count)]


def write_set(path: Path, count: int, turns: int = 1) -> Path:
    lines = [
        json.dumps({"id": job.task.id, "turns": list(job.task.turns)})
        for job in some_jobs(count, turns)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


class Server(ThreadingHTTPServer):
    """A server that answers with `words` words in chunks of two; `failure`: the kind of failure.

    Requests with the numbers in `together` are answered when three of them have arrived.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(
        self,
        words: int = 6,
        failure: str = "",
        metrics: bool = True,
        wait: float = 0.0,
        together: Container[int] = (),
    ) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.words = words
        self.failure = failure
        self.metrics = metrics
        self.wait = wait
        self.together = together
        self.meeting = threading.Barrier(3)
        self.requests: list[dict[str, Any]] = []
        self.concurrent = 0
        self.max_concurrent = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        drafts = len(self.server.requests)
        if self.path == "/v1/models":
            self.reply(200, json.dumps({"data": [{"id": "served"}]}))
        elif self.path == "/metrics" and self.server.metrics:
            lines = [
                f'vllm:spec_decode_num_drafts_total{{engine="0"}} {3.0 * drafts}',
                f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {6.0 * drafts}',
                f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {3.0 * drafts}',
                f'{PER_POSITION}{{engine="0",position="0"}} {2.0 * drafts}',
                f'{PER_POSITION}{{engine="0",position="1"}} {1.0 * drafts}',
            ]
            self.reply(200, "# HELP x\n" + "\n".join(lines) + "\n")
        else:
            self.reply(404, "nothing here")

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.requests.append(body | {"authorization": self.headers.get("Authorization")})
            number = len(server.requests)
            server.concurrent += 1
            server.max_concurrent = max(server.max_concurrent, server.concurrent)
        self.is_counted = True
        try:
            self.answer(body, number)
        finally:
            self.stop_counting()

    def stop_counting(self) -> None:
        """Stop counting this request, because its client may send the next one at its end."""
        with self.server.lock:
            self.server.concurrent -= self.is_counted
            self.is_counted = False

    def answer(self, body: dict[str, Any], number: int) -> None:
        failure = self.server.failure
        if number in self.server.together:
            self.server.meeting.wait(60)
        if failure == "500" or (failure == "some 500" and number % 2):
            return self.reply(500, '{"error": {"message": "out of luck"}}')
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.event(
            {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
        )
        for i in range(0, self.server.words, 2):
            time.sleep(self.server.wait)
            if failure == "dies" and i:
                return None
            if failure == "error" and i:
                return self.event({"error": {"message": "lost the thread", "code": 500}})
            self.event(
                {"choices": [{"delta": {"content": f"w{i} w{i + 1} "}, "finish_reason": None}]}
            )
        self.stop_counting()
        self.event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        if failure != "no usage":
            self.event({"choices": [], "usage": {"completion_tokens": self.server.words}})
        self.wfile.write(b"data: [DONE]\n\n")
        return None

    def event(self, content: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(content)}\n\n".encode())
        self.wfile.flush()

    def reply(self, code: int, text: str) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())


@contextmanager
def serving(**options: Any) -> Iterator[Server]:
    server = Server(**options)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
