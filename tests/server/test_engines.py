"""The engines of a server: the one that a request asks for, how many there are, what they counted."""

import asyncio
import threading
from dataclasses import replace
from typing import Any

import httpx
import pytest

from peagle.errors import UserError
from peagle.server.engines.local_backend import LocalBackend
from peagle.server.engines.method_choice import choose_method
from peagle.server.http.errors import ApiError
from tests.support.serving import SETTINGS, TEXT, ask, served, tiny_pair, until


def test_methods_agree_and_are_traced() -> None:
    async def test(client: httpx.AsyncClient, front: LocalBackend) -> None:
        plain = (await ask(client))["choices"]
        for choice in (
            {"method": "none"},
            {"method": "eagle3"},
            {"method": "eagle3", "k": 2},
            {"k": "auto"},
        ):
            assert (await ask(client, peagle=choice))["choices"] == plain
        chunks = await ask(client, stream=True, peagle={"trace": True})
        traced = [chunk["peagle"] for chunk in chunks if "peagle" in chunk]
        assert sum(one["tokens"] for one in traced) == 8
        assert all(one["k"] == 3 and 0 <= one["accepted"] <= one["tokens"] for one in traced)
        assert [text for one in traced for text in one["texts"]] == plain[0]["message"][
            "content"
        ].split()
        status = (await client.get("/v1/peagle/status")).json()
        assert status["method"] == "p-eagle" and status["k"] == 3 and status["state"] == "ready"
        assert set(status["methods"]) == {"none", "eagle3", "p-eagle"}
        assert set(status["engines"]) == {
            "p-eagle",
            "none",
            "eagle3",
            "eagle3 k=2",
            "p-eagle k=auto",
        }
        assert status["engines"]["p-eagle"]["accepted_per_position"]
        error = await ask(client, code=400, peagle={"method": "eagle"})
        assert "eagle3" in error["error"]["message"]

    served(test)


def test_trees_are_the_servers_own_choice() -> None:
    """A request that names a method or a K gets a chain of it."""

    async def test(client: httpx.AsyncClient, front: LocalBackend) -> None:
        plain = (await ask(client, peagle={"method": "none"}))["choices"]
        for choice in ({}, {"method": "eagle3"}, {"k": 2}, {"k": 20}):
            assert (await ask(client, peagle=choice))["choices"] == plain
        engines = front.engines
        assert engines.main is not None and set(engines.main.engine.metrics.k_steps) == {12}
        assert all(slot.engine.max_shape.is_chain for slot in engines.others.values())

    served(test, tree=12)


def test_trees_need_the_servers_drafter() -> None:
    pair = tiny_pair().pair
    with pytest.raises(UserError, match="need a p-eagle drafter"):
        choose_method(replace(SETTINGS, method=None, tree=12), replace(pair, method="eagle3"))


def test_engines_are_no_more_than_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    from peagle.server.engines import engine_pool

    monkeypatch.setattr(engine_pool, "MAX_ENGINES", 1)

    async def test(client: httpx.AsyncClient, front: LocalBackend) -> None:
        await ask(client, peagle={"k": 1})
        assert (await ask(client, code=503, peagle={"k": 2}))["error"][
            "type"
        ] == "service_unavailable_error"
        next(iter(front.engines.others.values())).used = 0
        await ask(client, peagle={"k": 2})
        assert list(front.engines.others) == [("p-eagle", 2)]
        counts = front.engines.counts()
        assert (
            counts["p-eagle k=1"]["generated_tokens"]
            == counts["p-eagle k=2"]["generated_tokens"]
            == 8
        )

    served(test)


def test_an_engine_stays_while_somebody_prepares_to_ask_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from peagle.server.engines import engine_pool
    from peagle.server.openai import submit as asking

    monkeypatch.setattr(engine_pool, "MAX_ENGINES", 1)
    held, scores = asyncio.Event(), asking.scores

    async def slow(*args: Any) -> Any:
        await held.wait()
        return await scores(*args)

    async def test(client: httpx.AsyncClient, front: LocalBackend) -> None:
        monkeypatch.setattr(asking, "scores", slow)
        waiting = asyncio.create_task(ask(client, TEXT, echo=True, logprobs=1, peagle={"k": 1}))
        await until(lambda: front.engines.others)
        monkeypatch.setattr(asking, "scores", scores)
        slot = front.engines.others["p-eagle", 1]
        slot.used = 0
        assert "busy" in (await ask(client, code=503, peagle={"k": 2}))["error"]["message"]
        held.set()
        assert (await waiting)["usage"]["completion_tokens"] == 8
        slot.used = 0
        await ask(client, peagle={"k": 2})
        assert slot.engine.closed and slot.askers == 0
        with pytest.raises(ApiError, match="closed just now"):
            front.engines.add(slot, [6])

    served(test)


def test_counters_never_go_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks while an engine goes is told the same as before and after."""
    seen, asked = list[int](), list[threading.Thread]()

    async def test(client: httpx.AsyncClient, front: LocalBackend) -> None:
        await ask(client, peagle={"k": 1})
        tallies = front.engines.tallies
        keep = tallies.keep

        def count() -> None:
            seen.append(front.engines.counts()["p-eagle k=1"]["generated_tokens"])

        def slow(slot: Any) -> None:
            keep(slot)
            asked.append(threading.Thread(target=count))
            asked[0].start()
            asked[0].join(0.3)

        monkeypatch.setattr(tallies, "keep", slow)
        count()
        front.engines.driver.submit(
            lambda: front.engines._retire(front.engines.others["p-eagle", 1])
        ).result()
        asked[0].join()
        count()
        assert seen == [8, 8, 8]

    served(test)
