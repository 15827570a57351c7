"""Every endpoint and field, on a tiny pair, in process."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from peagle import __version__
from peagle.server.front.engine_backend import EngineBackend
from peagle.server.http import app
from tests.support.server.serving import (
    CHAT,
    HELLO,
    TEXT,
    ask,
    events,
    make_backend,
    served,
    tiny_pair,
    until,
    word_tokenizer,
)


def expected(ids: list[int], max_tokens: int, **sampling: Any) -> str:
    return tiny_pair().generate(ids, method="none", max_tokens=max_tokens, **sampling).text


def usage_of(prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def test_chat_completions() -> None:
    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        answer = await ask(client)
        assert answer["object"] == "chat.completion" and answer["model"] == "tiny"
        assert answer["id"].startswith("chatcmpl-")
        choice = answer["choices"][0]
        assert choice["message"] == {
            "role": "assistant",
            "content": expected([94, 6, 9, 30], 8),
            "refusal": None,
        }
        assert choice["finish_reason"] == "length" and choice["logprobs"] is None
        assert answer["usage"] == usage_of(4, 8)
        metrics = answer["metrics"]["speculative_decoding"]
        assert sum(metrics["acceptance_histogram"]) == metrics["num_spec_steps"] > 0
        assert metrics["num_draft_tokens"] == 3 * metrics["num_spec_steps"]
        assert metrics["mean_acceptance_length"] >= 1

    served(test)


def test_chat_streams() -> None:
    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        whole = await ask(client)
        chunks = await ask(client, stream=True, stream_options={"include_usage": True})
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
        text = "".join(
            chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"]
        )
        assert text == whole["choices"][0]["message"]["content"]
        assert chunks[-2]["choices"][0]["finish_reason"] == "length"
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
        assert chunks[-1]["metrics"] == whole["metrics"]
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        bare = await ask(client, stream=True)
        assert "usage" not in bare[-1] and bare[-1]["metrics"] == whole["metrics"]
        always = await ask(
            client,
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        )
        assert [chunk["usage"]["completion_tokens"] for chunk in always][-1] == 8

    served(test)


def test_choices_have_different_seeds() -> None:
    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        sampling = {"n": 4, "seed": 5, "temperature": 1.5}
        texts = [
            choice["message"]["content"] for choice in (await ask(client, **sampling))["choices"]
        ]
        assert len(set(texts)) == 4
        assert texts == [
            choice["message"]["content"] for choice in (await ask(client, **sampling))["choices"]
        ]
        third = (await ask(client, seed=7, temperature=1.5))["choices"][0]["message"]["content"]
        assert third == texts[2]
        assert (await ask(client, **sampling))["usage"][
            "prompt_tokens"
        ] == 4  # the prompt is counted once
        streamed = ["", "", "", ""]
        for chunk in await ask(client, stream=True, **sampling):
            for choice in chunk["choices"]:
                streamed[choice["index"]] += choice["delta"].get("content", "")
        assert streamed == texts

    served(test)


def test_chat_logprobs() -> None:
    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        choice = (await ask(client, logprobs=True, top_logprobs=3))["choices"][0]
        content = choice["logprobs"]["content"]
        assert len(content) == 8
        assert " ".join(entry["token"] for entry in content) == choice["message"]["content"]
        for entry in content:
            assert entry["bytes"] == list(entry["token"].encode())
            assert len(entry["top_logprobs"]) == 3
            assert entry["top_logprobs"][0]["logprob"] == entry["logprob"] <= 0  # greedy
        bare = (await ask(client, logprobs=True))["choices"][0]["logprobs"]["content"]
        assert all(entry["top_logprobs"] == [] for entry in bare)
        chunks = await ask(client, logprobs=True, top_logprobs=3, stream=True)
        logprobs = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        assert [entry for part in logprobs if part for entry in part["content"]] == content

    served(test)


def test_completions() -> None:
    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        answer = await ask(client, TEXT)
        assert answer["object"] == "text_completion" and answer["id"].startswith("cmpl-")
        text = expected([6, 9, 30], 8)
        assert answer["choices"][0]["text"] == text
        assert (await ask(client, TEXT, prompt=[6, 9, 30]))["choices"][0]["text"] == text
        assert (await ask(client, TEXT, prompt=["w6 w9 w30", "w7"]))["choices"][1][
            "text"
        ] == expected([7], 8)
        many = await ask(client, TEXT, prompt=[[6, 9, 30], [7]], n=2)
        assert [choice["index"] for choice in many["choices"]] == [0, 1, 2, 3]
        assert many["choices"][3]["text"] == expected([7], 8)
        assert many["usage"] == usage_of(4, 32)
        echoed = await ask(client, TEXT, echo=True)
        assert echoed["choices"][0]["text"] == "w6 w9 w30" + text
        reply = await client.post(TEXT, json={"prompt": "w6", "temperature": 0})
        assert reply.json()["usage"]["completion_tokens"] <= 16
        chunks = await ask(client, TEXT, echo=True, stream=True)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "w6 w9 w30" + text

    served(test)


def test_completion_logprobs_with_echo() -> None:
    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        for max_tokens in (0, 1, 5):
            for stream in (False, True):
                answer = await ask(
                    client, TEXT, echo=True, logprobs=2, max_tokens=max_tokens, stream=stream
                )
                chunks = answer if stream else [answer]
                parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
                joined = {
                    key: [entry for part in parts if part for entry in part[key]]
                    for key in parts[0]
                }
                check_scores([6, 9, 30], joined, 3 + max_tokens)
                finishes = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
                assert finishes[-1] == "length"
        usage = (await ask(client, TEXT, echo=True, logprobs=2, max_tokens=0))["usage"]
        assert usage == usage_of(3, 0)
        alone = (await ask(client, TEXT, logprobs=0))["choices"][0]["logprobs"]
        assert all(len(top) == 1 for top in alone["top_logprobs"]) and len(alone["tokens"]) == 8

    served(test)


def check_scores(ids: list[int], logprobs: dict[str, list[Any]], length: int) -> None:
    import torch

    target = tiny_pair().target
    tokenizer = word_tokenizer()
    assert [
        len(logprobs[key]) for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    ] == [length] * 4
    tokens = ids + tokenizer.convert_tokens_to_ids(logprobs["tokens"][len(ids) :])
    assert logprobs["tokens"] == tokenizer.convert_ids_to_tokens(tokens)
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    expected_logprobs = target.forward(torch.tensor(tokens)).logits.log_softmax(-1)
    for i in range(1, length):
        assert logprobs["token_logprobs"][i] == pytest.approx(
            float(expected_logprobs[i - 1, tokens[i]]), abs=1e-3
        )
        best = tokenizer.convert_ids_to_tokens(int(expected_logprobs[i - 1].argmax()))
        assert logprobs["top_logprobs"][i][best] == max(logprobs["top_logprobs"][i].values())
        if i >= len(ids):  # lm-eval uses this comparison to find out whether an answer is greedy.
            assert logprobs["token_logprobs"][i] == max(logprobs["top_logprobs"][i].values())
    assert logprobs["text_offset"] == [sum(map(len, logprobs["tokens"][:i])) for i in range(length)]


def test_long_prompts_are_scored_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from peagle.server.engines import prompt_logprobs

    monkeypatch.setattr(prompt_logprobs, "ROWS_PER_PART", 3)
    prompt = [7 + i % 50 for i in range(20)]

    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        answer = await ask(client, TEXT, prompt=prompt, echo=True, logprobs=1, max_tokens=1)
        check_scores(prompt, answer["choices"][0]["logprobs"], 21)

    served(test)


def test_stop_strings_and_tokens() -> None:
    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        words = expected([6, 9, 30], 12).split()
        stop = next(word for i, word in enumerate(words) if i >= 3 and word not in words[:i])
        position = words.index(stop)
        before = " ".join(words[:position])
        for stops in (stop, [stop, "never"]):
            answer = await ask(client, TEXT, max_tokens=12, stop=stops)
            choice = answer["choices"][0]
            assert choice["text"].strip() == before and choice["finish_reason"] == "stop"
            assert answer["usage"]["completion_tokens"] == position + 1
        included = await ask(
            client, TEXT, max_tokens=12, stop=stop, include_stop_str_in_output=True
        )
        assert included["choices"][0]["text"].endswith(stop)
        by_id = await ask(client, TEXT, max_tokens=12, stop_token_ids=[int(stop[1:])])
        assert (
            by_id["choices"][0]["finish_reason"] == "stop"
            and by_id["usage"]["completion_tokens"] == position + 1
        )
        assert by_id["choices"][0]["text"].strip() == before
        shown = await ask(
            client,
            TEXT,
            max_tokens=12,
            stop_token_ids=[int(stop[1:])],
            include_stop_str_in_output=True,
        )
        assert shown["choices"][0]["text"].strip() == f"{before} {stop}"
        later = await ask(
            client, TEXT, max_tokens=12, stop_token_ids=[int(stop[1:])], min_tokens=position + 2
        )
        assert later["usage"]["completion_tokens"] >= position + 2
        chunks = await ask(client, TEXT, max_tokens=12, stop=stop, stream=True)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks).strip() == before

    served(test)


def test_choices_share_the_prefill_of_their_prompt() -> None:
    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        assert backend.engines.main is not None
        # two full pages of 64 tokens, and a partial one
        words = " ".join(f"w{6 + i % 60}" for i in range(140))
        await ask(client, TEXT, words=words, n=4, temperature=1, seed=1)
        assert backend.engines.main.engine.metrics.cached_tokens == 3 * 128

    served(test)


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("keys", [(), ("one", "two")])
def test_keys_and_salts_keep_prefixes_apart(path: str, keys: tuple[str, ...]) -> None:
    """Prefixes of one API key or cache salt must not speed up requests of another one."""
    words = " ".join(f"w{6 + i % 60}" for i in range(140))

    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        assert backend.engines.main is not None
        metrics = backend.engines.main.engine.metrics

        async def cached(key: str, **body: Any) -> int:
            before = metrics.cached_tokens
            client.headers["authorization"] = f"Bearer {key}"
            await ask(client, path, words=words, **body)
            return metrics.cached_tokens - before

        apart = bool(keys)
        assert await cached("one") == 0 and await cached("one") == 128
        assert await cached("two") == (0 if apart else 128)
        assert await cached("two") == await cached("one") == 128
        assert await cached("one", cache_salt="a") == 0
        assert await cached("one", cache_salt="a") == 128
        assert await cached("two", cache_salt="a") == (0 if apart else 128)
        assert await cached("one", cache_salt="b") == 0
        for wrong in ("", 7, "a" * 513):
            await ask(client, path, code=400, cache_salt=wrong)

    served(test, api_keys=keys)


def test_sampling_fields() -> None:
    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        async def text(**fields: Any) -> str:
            return (await ask(client, TEXT, **fields))["choices"][0]["text"]

        assert await text(logit_bias={"40": 100}) == " ".join(["w40"] * 8)
        assert await text(logit_bias={40: 100}, presence_penalty=2, frequency_penalty=-1.5) != ""
        assert await text(repetition_penalty=1.8) == expected([6, 9, 30], 8, repetition_penalty=1.8)
        for fields in ({"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.3}, {"top_k": -1}):
            sampled = await text(temperature=1.2, seed=3, **fields)
            sampling = {name: max(value, 0) for name, value in fields.items()}
            assert sampled == expected([6, 9, 30], 8, temperature=1.2, seed=3, **sampling)
        long = await ask(client, TEXT, ignore_eos=True, max_tokens=40, logit_bias={"1": 5})
        assert long["usage"]["completion_tokens"] == 40
        short = await ask(client, TEXT, max_tokens=40, logit_bias={"1": 100})
        assert (
            short["usage"]["completion_tokens"] == 1
            and short["choices"][0]["finish_reason"] == "stop"
        )

    served(test)


def test_message_formats() -> None:
    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        parts = [{"type": "text", "text": "w6 w9"}, {"type": "text", "text": "w30"}]
        plain = await ask(client)
        assert (await ask(client, messages=[{"role": "developer", "content": parts}]))[
            "choices"
        ] == plain["choices"]
        several = [
            {"role": "system", "content": "w3"},
            {"role": "assistant", "content": None},
            *HELLO,
        ]
        assert (await ask(client, messages=several))["usage"]["prompt_tokens"] == 7
        more = await ask(client, chat_template_kwargs={"more": "w8 w9"})
        assert more["usage"]["prompt_tokens"] == 6
        body = {
            "messages": HELLO,
            "temperature": 0,
            "max_completion_tokens": 3,
            "unknown": {"a": 1},
            "model": "",
        }
        reply = await client.post(
            CHAT, json=body | {"n": None, "stop": None, "response_format": {"type": "text"}}
        )
        assert reply.json()["usage"]["completion_tokens"] == 3
        endless = await client.post(
            CHAT, json={"messages": HELLO, "temperature": 0, "ignore_eos": True}
        )
        assert endless.json()["usage"]["total_tokens"] == 256  # up to the end of the context

    served(test)


def test_requests_are_counted_by_status() -> None:
    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        await ask(client)
        await ask(client, code=400, temperature=-1)
        await client.get("/health")
        page = (await client.get("/metrics")).text
        assert 'peagle:requests_total{model_name="tiny",status="200"} 1.0' in page
        assert 'peagle:requests_total{model_name="tiny",status="400"} 1.0' in page
        assert 'peagle:requests_total{model_name="tiny",status="429"} 0.0' in page

    served(test)


LOCAL = {"host": "127.0.0.1:8000"}
ORIGINS: list[tuple[dict[str, str], dict[str, Any], int]] = [
    (LOCAL, {}, 200),
    (LOCAL | {"origin": "http://127.0.0.1:8000"}, {}, 200),
    (LOCAL | {"origin": "http://127.0.0.1:9000"}, {}, 403),
    (LOCAL | {"origin": "https://evil.example"}, {}, 403),
    (LOCAL | {"origin": "null"}, {}, 403),
    (LOCAL | {"origin": "https://evil.example"}, {"api_keys": ("key",)}, 200),
    (LOCAL | {"origin": "https://Chat.example"}, {"allow_origins": ("https://chat.example",)}, 200),
    ({"host": "localhost:8000", "origin": "http://localhost:8000"}, {}, 200),
    ({"host": "[::1]:8000"}, {}, 200),
    ({"host": "evil.example:8000", "origin": "http://evil.example:8000"}, {}, 403),
    ({"host": "evil.example"}, {}, 403),
    ({"host": "127.0.0.1.evil.example"}, {}, 403),
    ({"host": "chat.example"}, {"allow_origins": ("https://chat.example",)}, 200),
    ({"host": "model.example:8080"}, {"host": "0.0.0.0"}, 200),
    ({"host": "model.example:8080", "origin": "https://evil.example"}, {"host": "0.0.0.0"}, 403),
]


@pytest.mark.parametrize(("headers", "settings", "code"), ORIGINS)
def test_origins(headers: dict[str, str], settings: dict[str, Any], code: int) -> None:
    async def test() -> None:
        backend = make_backend(**settings)
        transport = httpx.ASGITransport(app=app.build_app(backend))
        key = {"authorization": "Bearer key"}
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            assert (await client.get("/v1/models", headers=headers | key)).status_code == code
            assert (await client.get("/version", headers=headers)).status_code == 200

    asyncio.run(test())


def test_other_endpoints() -> None:
    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        for method in ("GET", "POST"):
            for path in ("/health", "/ping"):
                assert (await client.request(method, path)).status_code == 200
        assert (await client.get("/version")).json() == {"version": __version__}
        listed = (await client.get("/v1/models")).json()
        assert listed["data"][0]["id"] == "tiny" and listed["data"][0]["max_model_len"] == 256
        assert (await client.get("/v1/models/tiny")).json() == listed["data"][0]
        assert (await client.get("/v1/models/other")).status_code == 404
        tokens = (
            await client.post("/tokenize", json={"prompt": "w6 w9", "return_token_strs": True})
        ).json()
        assert tokens == {
            "count": 2,
            "max_model_len": 256,
            "tokens": [6, 9],
            "token_strs": ["w6", "w9"],
        }
        assert (await client.post("/tokenize", json={"messages": HELLO})).json()["tokens"] == [
            94,
            6,
            9,
            30,
        ]
        assert (await client.post("/detokenize", json={"tokens": [6, 9]})).json() == {
            "prompt": "w6 w9"
        }
        assert (await client.post("/tokenize", json={})).status_code == 400
        assert (await client.post("/detokenize", json={"tokens": [960]})).status_code == 400
        assert (await client.get("/")).status_code in (200, 404)  # the page
        document = (await client.get("/openapi.json")).json()
        assert document["components"]["schemas"]["ChatRequest"]["properties"]["messages"]

    served(test)


def test_page_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "index.html").write_text("<title>race</title>")
    (tmp_path / "race.js").write_text("export const k = 7;")
    monkeypatch.setattr(app, "PAGE_FOLDER", tmp_path)

    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        index = await client.get("/")
        assert (
            index.text == "<title>race</title>"
            and "script-src 'self';" in index.headers["content-security-policy"]
        )
        assert "unsafe" not in index.headers["content-security-policy"]
        script = await client.get("/page/race.js")
        assert (
            "javascript" in script.headers["content-type"]
            and script.headers["x-content-type-options"] == "nosniff"
        )
        assert script.headers["cache-control"] == "no-cache" and script.headers["etag"]
        again = await client.get("/page/race.js", headers={"if-none-match": script.headers["etag"]})
        assert again.status_code == 304
        assert (await client.get("/page/none.js")).json()["error"]["code"] == 404

    served(test, api_keys=("key",))  # The page itself needs no key: it asks the user for one.


def test_scoring_stops_when_the_client_disconnects(monkeypatch: pytest.MonkeyPatch) -> None:
    from peagle.server.engines import prompt_logprobs

    real = prompt_logprobs.score_part
    monkeypatch.setattr(prompt_logprobs, "ROWS_PER_PART", 1)
    monkeypatch.setattr(
        prompt_logprobs, "score_part", lambda *args: (time.sleep(0.2), real(*args))[1]
    )

    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        body = {"prompt": [7] * 200, "echo": True, "logprobs": 1, "max_tokens": 1}
        asking = asyncio.create_task(client.post(TEXT, json=body))
        await until(lambda: backend.engines.driver.long_jobs)
        asking.cancel()
        # The whole prompt would take 40 s.
        await until(lambda: not backend.engines.driver.long_jobs, seconds=30)
        assert (await ask(client))["usage"]["completion_tokens"] == 8

    served(test)


def test_invocations() -> None:
    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        chat = {"messages": HELLO, "max_tokens": 4, "temperature": 0}
        assert (await client.post("/invocations", json=chat)).json()["object"] == "chat.completion"
        text = json.dumps({"prompt": "w6", "max_tokens": 4, "stream": True})
        reply = await client.post(
            "/invocations", content=text, headers={"content-type": "application/octet-stream"}
        )
        assert events(reply.text)[0]["object"] == "text_completion"
        assert (await client.post("/invocations", json={"inputs": "w6"})).status_code == 400

    served(test)


def test_metrics() -> None:
    from peagle.bench.load.server_metrics import parse_metrics

    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        await ask(client)
        await ask(client, stream=True)
        page = (await client.get("/metrics")).text
        spec = parse_metrics(page)
        assert spec is not None and spec.drafts > 0 and spec.draft_tokens == 3 * spec.drafts
        label = '{engine="p-eagle",model_name="tiny"'
        samples = dict(
            line.rsplit(" ", 1)
            for line in page.splitlines()
            if line.startswith(("vllm:", "peagle:"))
        )
        values = {
            name.replace('{model_name="tiny",engine="p-eagle"', label): float(x)
            for name, x in samples.items()
        }
        assert values[f"vllm:generation_tokens_total{label}}}"] == 16
        assert values[f"vllm:prompt_tokens_total{label}}}"] == 8
        assert (
            values[f"vllm:kv_cache_usage_perc{label}}}"]
            == values[f"vllm:num_requests_running{label}}}"]
            == 0
        )
        for name in (
            "time_to_first_token",
            "e2e_request_latency",
            "request_queue_time",
            "request_time_per_output_token",
        ):
            assert values[f"vllm:{name}_seconds_count{label}}}"] == 2, name
        assert values[f"vllm:inter_token_latency_seconds_count{label}}}"] > 0
        assert [
            values[f"peagle:num_speculative_{unit}{label}}}"] for unit in ("tokens", "nodes")
        ] == [3, 3]
        assert 'finished_reason="length"' in page and 'position="0"' in page
        assert "vllm:num_preemptions_total" in page and "vllm:prefix_cache_queries_total" in page
        assert 'peagle:engine_up{model_name="tiny"} 1.0' in page

    served(test)
