"""Learning end to end: a server stores answers, the learner promotes, the server swaps."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from peagle.learn.events import read_events
from peagle.learn.folder import LearnFolder
from peagle.learn.status import read_status
from peagle.learn.training.round_settings import SETTINGS_FILE
from peagle.learn.versions import list_versions
from tests.support.server.live_server import LiveServer, live_server
from tests.support.train.learning import QUICK, answers, tiny_root

WAIT_SECONDS = 240.0


class Traffic:
    """Sends requests to a server; each must succeed."""

    def __init__(self, server: LiveServer) -> None:
        self.client = httpx.Client(base_url=server.url, timeout=60)
        self.sent = 0

    def ask(self, prompt: list[int]) -> str:
        body = {"prompt": prompt, "max_tokens": 24, "temperature": 0}
        answer = self.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        self.sent += 1
        return answer.json()["choices"][0]["text"]

    def ask_all(self) -> list[str]:
        with ThreadPoolExecutor(4) as threads:
            return list(threads.map(self.ask, [document.prompt for document in answers()]))

    def drafter(self) -> dict[str, Any]:
        return self.client.get("/v1/peagle/drafter").json()


def test_a_server_learns_from_its_answers(tmp_path: Path) -> None:
    folder = LearnFolder(tmp_path / "learn")
    folder.root.mkdir()
    (folder.root / SETTINGS_FILE).write_text(json.dumps(QUICK))
    options = ("--method", "p-eagle", "-k", "4", "--learn", str(folder.root), "--kv-tokens", "4096")
    with live_server(tiny_root(), *options) as server:
        traffic = Traffic(server)
        before = traffic.ask_all()
        end = time.monotonic() + WAIT_SECONDS
        while not (events := [line for line in server.log if line["event"] == "drafter swapped"]):
            assert time.monotonic() < end, (read_status(folder), read_events(folder.events))
            assert traffic.ask(answers()[0].prompt) == before[0]  # also during training
            time.sleep(1.0)
        assert traffic.ask_all() == before
        status = traffic.drafter()
        metrics = traffic.client.get("/metrics").text
    assert events[0]["version"] == 1
    record = list_versions(folder)[0]  # Answers after the swap may have led to a second version.
    assert record.state == "promoted" and record.held_back is not None
    assert record.held_back.low > 1.01
    assert status["current"]["number"] >= 1
    assert traffic.sent >= 2 * len(answers())
    assert "peagle:learn_versions" in metrics
