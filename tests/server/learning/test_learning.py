"""`peagle serve --learn` in this process: what is stored, swaps of the drafter, the endpoint."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from peagle.errors import UserError
from peagle.learn.engine_load import EngineLoad
from peagle.learn.folder import LearnFolder
from peagle.learn.store_reader import read_documents
from peagle.learn.versions import list_versions, read_current, set_current
from peagle.loaded import LoadedPair
from peagle.server.engine_process.engine_supervisor import worker_settings
from peagle.server.front.engine_backend import EngineBackend
from peagle.server.front.generation_params import GenerationParams
from peagle.server.settings import ServerSettings
from peagle.server.supervisor.launch_spec import inherited_environment
from tests.support.models.versions import add_version
from tests.support.server.serve_learning import LEARN, learning_of
from tests.support.server.serving import (
    HELLO,
    SETTINGS,
    TEXT,
    WORDS,
    ask,
    make_backend,
    served,
    slowed,
    thread_engines,
    until,
)

DRAFTER = "/v1/peagle/drafter"
AGENT_OPT_OUTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/messages", {"messages": HELLO, "max_tokens": 4, "metadata": {"user_id": "private"}}),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 4, "peagle": {"learn": False}}),
    ("/v1/responses", {"input": WORDS, "max_output_tokens": 4, "user": "private"}),
    ("/v1/responses", {"input": WORDS, "max_output_tokens": 4, "peagle": {"learn": False}}),
]
VARIED: dict[str, Any] = {"ignore_eos": True, "frequency_penalty": 2.0}


def stored(folder: LearnFolder) -> list[tuple[list[int], list[int]]]:
    return [(document.prompt, document.answer) for document in read_documents(folder)]


def tokens(words: str) -> list[int]:
    """The token ids of the words of an answer."""
    return [94 if word == "<user>" else int(word.removeprefix("w")) for word in words.split()]


async def abort_request(backend: EngineBackend, prompt: list[int]) -> None:
    """Begin a request that may be stored, and abort it."""
    engines = thread_engines(backend)
    with slowed(backend, 0.01):
        async with engines.slot(engines.key) as slot:
            params = GenerationParams(200, ignore_eos=True, learn=True)
            stream, _ = await engines.add(slot, prompt, params)
        async for _ in stream:
            stream.abort()
            break
        await until(lambda: all(slot.engine.idle for slot in engines.slots))


def test_answered_requests_are_stored(pair: LoadedPair, folder: LearnFolder) -> None:
    """Completed answers are stored, unless the request opts out or is aborted."""

    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        first = await ask(client, TEXT, **VARIED)
        text = first["choices"][0]["text"]
        chat = await ask(client, max_tokens=4, ignore_eos=True)
        stop = text.split()[3]
        await ask(client, TEXT, stop=stop, **VARIED)
        await ask(client, TEXT, peagle={"learn": False})
        await ask(client, TEXT, user="private")
        for path, body in AGENT_OPT_OUTS:
            reply = await client.post(path, json=body | {"model": "tiny"})
            assert reply.status_code == 200, reply.text
        await ask(client, TEXT, max_tokens=0, echo=True)
        await abort_request(backend, tokens(WORDS))
        await ask(client, TEXT, words="w9", ignore_eos=True, max_tokens=2)
        await until(lambda: learning_of(backend).report().documents == 4)
        documents = stored(folder)
        prompt = tokens(WORDS)
        assert documents[0] == (prompt, tokens(text))
        assert documents[1][1] == tokens(chat["choices"][0]["message"]["content"])
        assert documents[2][0] == prompt
        stopped = documents[2][1]
        assert 1 <= len(stopped) <= 8 and stopped == documents[0][1][: len(stopped)]
        assert documents[3][0] == tokens("w9")
        report = (await client.get("/v1/peagle/status")).json()["learn"]
        assert report["store"]["documents"] == 4 and report["store"]["dropped"] == 0
        assert report["failure"] is None

    served(test, lambda: pair, learn=str(folder.root), learn_opt_out=("private",), **LEARN)


def test_keys_can_opt_out_and_are_not_written(pair: LoadedPair, folder: LearnFolder) -> None:
    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        for key in ("secret-a", "secret-b", "secret-a"):
            headers = {"authorization": f"Bearer {key}"}
            body = {"messages": HELLO, "max_tokens": 3 if key == "secret-b" else 5}
            body |= {"ignore_eos": True, "user": "somebody"}
            reply = await client.post("/v1/chat/completions", json=body, headers=headers)
            assert reply.status_code == 200
        await until(lambda: stored(folder))
        assert [len(answer) for _, answer in stored(folder)] == [3]

    keys = ("secret-a", "secret-b")
    served(test, lambda: pair, learn=str(folder.root), learn_opt_out=("secret-a",), api_keys=keys)
    written = b"".join(file.read_bytes() for file in folder.root.rglob("*") if file.is_file())
    assert b"secret" not in written and b"somebody" not in written


def test_keys_are_not_passed_to_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(SETTINGS, learn="folder", learn_opt_out=("secret",))
    assert worker_settings(settings, {}).learn_opt_out == ()
    assert worker_settings(settings, {}).learn == "folder"
    monkeypatch.setenv("PEAGLE_LEARN_OPT_OUT", "secret")
    assert "secret" not in inherited_environment().values()


def test_without_learn_nothing_is_stored() -> None:
    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        await ask(client)
        assert "learn" not in (await client.get("/v1/peagle/status")).json()
        assert b"peagle:learn" not in await backend.metrics()
        for reply in (await client.get(DRAFTER), await client.post(DRAFTER, json={"version": 1})):
            assert reply.status_code == 404
            assert "--learn" in reply.json()["error"]["message"]

    served(test)


def test_the_load_file_follows_the_engine(pair: LoadedPair, folder: LearnFolder) -> None:
    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        def busy() -> bool:
            return any(load.busy for load in EngineLoad.read_all(folder))

        assert len(EngineLoad.read_all(folder)) == 1 and not busy()
        with slowed(backend, 0.02):
            request = asyncio.create_task(ask(client, TEXT, max_tokens=200, ignore_eos=True))
            await until(busy)
        await request
        await until(lambda: not busy())

    served(test, lambda: pair, learn=str(folder.root), **LEARN)


def test_versions_are_swapped_while_requests_run(
    pair: LoadedPair, folder: LearnFolder, root: Path
) -> None:
    """Answers do not change, none is lost, and every engine of the method gets the version."""
    for number in (1, 2):
        add_version(folder, pair, root, number, parent=number - 1)

    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        async def run(method: str, k: int) -> str:
            reply = await ask(
                client, TEXT, max_tokens=60, peagle={"method": method, "k": k}, **VARIED
            )
            return str(reply["choices"][0]["text"])

        async def run_until_swapped(k: int) -> set[str]:
            texts = {await run("p-eagle", k)}
            while not swapped.is_set():
                texts.add(await run("p-eagle", k))
            return texts

        engines = thread_engines(backend)
        swapped = asyncio.Event()
        expected = await run("none", 1)
        assert len(set(expected.split())) > 10
        await run("p-eagle", 2)  # builds an extra engine of the method
        with slowed(backend, 0.01):
            requests = [asyncio.create_task(run_until_swapped(k)) for k in (2, 3, 3)]
            await until(lambda: engines.main.engine.busy)  # type: ignore[union-attr]
            for number in (1, 2, 0, 1):
                await asyncio.to_thread(set_current, folder, number, "a test")
                await until(
                    lambda number=number: (
                        {
                            slot.engine.drafter_version
                            for slot in engines.slots
                            if slot.engine.method == "p-eagle"
                        }
                        == {number}
                    )
                )
            swapped.set()
            assert await asyncio.gather(*requests) == [{expected}] * 3
        learn = (await client.get("/v1/peagle/status")).json()["learn"]
        assert learn["engines"] == {"engine": 1} and learn["failure"] is None
        assert learn["acceptance_lengths"].keys() == {"0", "1", "2"}

    served(test, lambda: pair, learn=str(folder.root), **LEARN)


def test_the_current_version_is_loaded_at_the_start(
    pair: LoadedPair, folder: LearnFolder, root: Path
) -> None:
    add_version(folder, pair, root, 1, parent=0)
    set_current(folder, 1, "a test")

    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        versions = learning_of(backend).versions
        assert versions is not None and versions.version == 1
        await until(lambda: thread_engines(backend).main.engine.drafter_version == 1)  # type: ignore[union-attr]

    served(test, lambda: pair, learn=str(folder.root), **LEARN)


def test_versions_are_changed_over_http(pair: LoadedPair, folder: LearnFolder, root: Path) -> None:
    for number in (1, 2, 3):
        add_version(folder, pair, root, number, parent=number - 1)
    (folder.versions / "0003" / "model.safetensors").write_bytes(b"broken")

    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        async def change(code: int, **body: Any) -> Any:
            reply = await client.post(DRAFTER, json=body)
            assert reply.status_code == code, reply.text
            return reply.json()

        listed = (await client.get(DRAFTER)).json()
        assert listed["current"]["number"] == 0
        assert [version["number"] for version in listed["versions"]] == [1, 2, 3]
        changed = await change(200, version=2)
        assert changed["current"]["number"] == 2 and changed["engines"] == {"engine": 2}
        assert (await change(200, version=2))["engines"] == {"engine": 2}
        assert (await change(200, rollback=True))["engines"] == {"engine": 1}
        assert [record.state for record in list_versions(folder)][:2] == ["promoted", "rolled back"]
        refused = await change(409, version=3)
        assert "version 3" in refused["error"]["message"]
        assert read_current(folder).number == 1
        await until(lambda: learning_of(backend).report().failed_version is None)
        assert (await change(200, version=0))["engines"] == {"engine": 0}
        await change(409, rollback=True)
        for body in ({}, {"version": 1, "rollback": True}, {"version": -1}, {"version": "x"}):
            await change(400, **body)
        await change(404, version=9)
        events = (await client.get("/v1/peagle/status")).json()["learn"]["events"]
        assert "rolled back" in [event["kind"] for event in events]

    served(test, lambda: pair, learn=str(folder.root), **LEARN)


def test_metrics_of_learning(pair: LoadedPair, folder: LearnFolder, root: Path) -> None:
    add_version(folder, pair, root, 1, parent=0)

    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        await ask(client, TEXT, ignore_eos=True, max_tokens=8)
        await until(lambda: learning_of(backend).report().documents == 1)
        page = (await client.get("/metrics")).text
        for line in (
            'peagle:learn_documents_total{model_name="tiny"} 1.0',
            'peagle:learn_dropped_total{model_name="tiny"} 0.0',
            'peagle:learn_up{model_name="tiny"} 1.0',
            'peagle:learn_version{model_name="tiny",process="engine"} 0.0',
            'peagle:learn_versions{model_name="tiny",state="promoted"} 1.0',
            'peagle:learn_trainer{model_name="tiny",state="waiting"} 1.0',
        ):
            assert line in page, line
        for name in ("tokens_total", "drafts_total", "accepted_tokens_total", "store_bytes"):
            assert f"peagle:learn_{name}{{" in page, name

    served(test, lambda: pair, learn=str(folder.root), **LEARN)


@pytest.mark.parametrize("case", ["target", "drafter", "current"])
def test_an_incompatible_folder_turns_learning_off(
    pair: LoadedPair, folder: LearnFolder, root: Path, case: str
) -> None:
    """Serving continues, the reason is reported, and the folder does not change."""
    folder.root.mkdir()
    if case == "target":
        identity = {"target": "other", "revision": None, "vocab_size": 96, "digest": "x"}
        folder.identity.write_text(json.dumps(identity | {"created": 1.0, "format": 1}))
        reason = "answers of the target 'other'"
    elif case == "drafter":
        add_version(folder, pair, root, 1, parent=0, base="another")
        set_current(folder, 1, "a test")
        reason = "another drafter"
    else:
        folder.current.write_text("{")
        reason = "current.json"
    before = {file: file.read_bytes() for file in folder.root.rglob("*") if file.is_file()}

    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        await ask(client)
        learn = (await client.get("/v1/peagle/status")).json()["learn"]
        assert reason in learn["failure"]
        assert 'peagle:learn_up{model_name="tiny"} 0.0' in (await client.get("/metrics")).text
        if case != "current":
            refused = await client.post(DRAFTER, json={"version": 0})
            assert refused.status_code == 409 and reason in refused.text
            assert stored(folder) == []

    served(test, lambda: pair, learn=str(folder.root), **LEARN)
    assert all(file.read_bytes() == content for file, content in before.items())


def test_learning_without_a_drafter_is_an_error(pair: LoadedPair, folder: LearnFolder) -> None:
    """The method is only known after the pair is loaded."""

    async def main() -> str:
        bare = LoadedPair(replace(pair.pair, drafters={}, method="none"), pair.target)
        backend = make_backend(lambda: bare, learn=str(folder.root), method=None, k="auto")
        failures: list[str] = []
        backend.engines.on_failure = failures.append
        backend.engines.start()
        try:
            await until(lambda: failures)
        finally:
            await backend.engines.close()
        return failures[0]

    assert "`learn` trains a drafter" in asyncio.run(main())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine": "vllm"}, "not supported with `engine` vllm"),
        ({"method": "none"}, "`method` none has none"),
        ({"method": "ngram"}, "`method` ngram has none"),
        ({"learn_share": 0}, "`learn_share` must be above 0"),
        ({"learn_share": 1.5}, "`learn_share`"),
        ({"learn_size": 0}, "`learn_size`"),
        ({"learn_days": 0}, "`learn_days`"),
        ({"learn_time": 2}, "`learn_time` must be 0 to 1"),
        ({"learn_memory": -1}, "`learn_memory`"),
        ({"learn_opt_out": ("",)}, "`learn_opt_out` must not be empty"),
        ({"learn": None, "learn_opt_out": ("a",)}, "need `learn`"),
        ({"learn": ""}, "must name a folder"),
    ],
)
def test_invalid_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ServerSettings(**{"learn": "folder"} | changes)
