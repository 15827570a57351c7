"""`peagle serve --engine vllm` with the default pair: answers, metrics, SIGKILL of its engine."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed: run `make test-vllm`")

import httpx

import peagle
from tests.support.server.relaying import descendants, is_alive, is_healthy, running_command
from tests.support.waiting import wait_for

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        not os.environ.get("PEAGLE_REAL_TARGET"), reason="PEAGLE_REAL_TARGET names no target folder"
    ),
]
PROMPTS = [
    "Why is the sky blue?",
    "Write a Python function that adds two numbers.",
    "What is 17 times 3?",
]
K = 5
TOKENS = 48


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, str, Path]]:
    log = tmp_path_factory.mktemp("serve") / "log"
    options = ["--engine", "vllm", "-k", str(K), "--dtype", "float32", "--context", "2048"]
    options += ["--enforce-eager", "--", "--seed", "0"]
    space = {"VLLM_CPU_KVCACHE_SPACE": "1"}
    with running_command(log, "smollm2-135m", *options, seconds=300, **space) as (process, url):
        yield process, url, log


def ask(url: str, prompt: str, **more: Any) -> httpx.Response:
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": TOKENS,
        "temperature": 0,
    }
    return httpx.post(f"{url}/v1/chat/completions", json=body | more, timeout=300)


def status(url: str) -> dict[str, Any]:
    record: dict[str, Any] = httpx.get(f"{url}/v1/peagle/status", timeout=60).json()
    return record


def test_answers_equal_the_native_engine(live: tuple[Any, str, Path]) -> None:
    _, url, _ = live
    native = peagle.load("smollm2-135m", dtype="float32", device="cpu")
    for prompt in PROMPTS:
        reply = ask(url, prompt).json()
        expected = native.generate(prompt, k=K, max_tokens=TOKENS).text
        assert reply["choices"][0]["message"]["content"] == expected
        metrics = reply["metrics"]["speculative_decoding"]
        assert metrics["num_spec_steps"] > 0 and metrics["mean_acceptance_length"] > 1
    engine = status(url)["engines"]["p-eagle"]
    assert engine["k"] == K and engine["draft_tokens"] == K * engine["drafts"] > 0
    length = round(1 + engine["accepted_tokens"] / engine["drafts"], 4)
    assert engine["acceptance_length"] == length > 1.5
    page = httpx.get(f"{url}/metrics", timeout=60).text
    labels = '{engine="0",model_name="smollm2-135m"}'
    assert f"vllm:spec_decode_num_drafts_total{labels} {engine['drafts']:.1f}" in page
    types = [line for line in page.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types)) and "# TYPE peagle:engine_up gauge" in types
    print(f"\nacceptance length {length} at K={K}, {engine['generated_tokens']} tokens")


def test_errors_of_vllm_and_of_the_gateway(live: tuple[Any, str, Path]) -> None:
    _, url, _ = live
    refused = ask(url, "x", temperature=-1)
    assert refused.status_code == 400 and set(refused.json()["error"]) >= {
        "message",
        "type",
        "param",
        "code",
    }
    assert ask(url, "x", peagle={"method": "eagle3"}).status_code == 400
    assert ask(url, "x", model="other").status_code == 404
    models = httpx.get(f"{url}/v1/models").json()["data"]
    assert models[0]["id"] == "smollm2-135m" and models[0]["max_model_len"] == 2048
    ids = httpx.post(f"{url}/tokenize", json={"prompt": "hello world"}).json()["tokens"]
    assert httpx.post(f"{url}/detokenize", json={"tokens": ids}).json()["prompt"] == "hello world"


def test_vllm_is_restarted_after_sigkill_of_its_engine_core(live: tuple[Any, str, Path]) -> None:
    _, url, _ = live
    before = ask(url, PROMPTS[0]).json()["choices"][0]["message"]["content"]
    responses: dict[bool, httpx.Response] = {}  # True: the stream
    options: Any = {"max_tokens": 1500, "ignore_eos": True}

    def run(stream: bool) -> None:
        responses[stream] = ask(url, "Count to a thousand.", stream=stream, **options)

    threads = [threading.Thread(target=run, args=(stream,)) for stream in (True, False)]
    for thread in threads:
        thread.start()
    wait_for(lambda: status(url)["engines"]["p-eagle"]["running"] == 2, 60)
    family = descendants(status(url)["workers"][0]["pid"])
    core = next(pid for pid in family if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes())
    killed = time.monotonic()
    os.kill(core, signal.SIGKILL)
    for thread in threads:
        thread.join(timeout=60)
    lines = [line.removeprefix("data: ") for line in responses[True].text.split("\n\n") if line]
    assert lines[-1] == "[DONE]" and "error" in json.loads(lines[-2]) and len(lines) > 3
    assert responses[False].status_code == 503 and responses[False].headers["retry-after"]
    assert ask(url, "x").status_code == 503
    failed = time.monotonic() - killed
    wait_for(lambda: is_healthy(url), 300)
    recovered = time.monotonic() - killed
    print(f"\nclients got errors within {failed:.1f} s; answers again after {recovered:.0f} s")
    assert not any(map(is_alive, family)), "processes of vLLM remain"
    assert ask(url, PROMPTS[0]).json()["choices"][0]["message"]["content"] == before
    assert status(url)["restarts"] == 1


def test_no_process_remains_after_the_server_is_killed(live: tuple[Any, str, Path]) -> None:
    """This test ends the server, so it must be the last one in this file."""
    process, _, _ = live
    family = descendants(process.pid)
    assert any(b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in family)
    process.kill()
    process.wait()
    wait_for(lambda: not any(map(is_alive, family)), 30)
