"""`peagle serve --learn`: broken files, temporary failures, engines built during a swap."""

import shutil
import threading
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from peagle.drafter import Drafter
from peagle.engine import Engine
from peagle.learn.folder import LearnFolder
from peagle.learn.versions import set_current
from peagle.loaded import LoadedPair
from peagle.paths import write_bytes
from peagle.server.front.engine_backend import EngineBackend
from peagle.server.messages import LearnReport, VersionCounts
from peagle.server.worker import drafter_versions
from tests.support.models.versions import add_version
from tests.support.server.serve_learning import LEARN, learning_of
from tests.support.server.serving import TEXT, ask, served, thread_engines, until


def has_version(backend: EngineBackend, number: int) -> bool:
    return learning_of(backend).report().version == number


def test_the_drafter_of_an_engine_built_during_a_swap_is_replaced(
    pair: LoadedPair, folder: LearnFolder, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine may have any version, so its drafter is replaced whatever version it reports."""
    add_version(folder, pair, root, 1, parent=0)
    replaced: list[Engine] = []
    replace_drafter = Engine.replace_drafter

    def replace_and_record(engine: Engine, drafter: Drafter, version: int = 0) -> None:
        replaced.append(engine)
        replace_drafter(engine, drafter, version)

    monkeypatch.setattr(Engine, "replace_drafter", replace_and_record)

    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        engines = thread_engines(backend)
        for number in (1, 0):
            set_current(folder, number, "a test")
            await until(partial(has_version, backend, number))
        await ask(client, TEXT, peagle={"method": "p-eagle", "k": 2})
        extra = next(slot.engine for slot in engines.slots if slot is not engines.main)
        await until(lambda: extra in replaced)
        assert extra.drafter_version == 0

    served(test, lambda: pair, learn=str(folder.root), **LEARN)


def test_a_report_during_a_swap_counts_every_draft_once(
    pair: LoadedPair, folder: LearnFolder, root: Path
) -> None:
    """Another thread requests a report while the counts of the previous version are saved."""
    add_version(folder, pair, root, 1, parent=0)
    reports: list[LearnReport] = []

    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        learning = learning_of(backend)

        class ReportedCounts(dict[int, VersionCounts]):
            def __setitem__(self, version: int, counts: VersionCounts) -> None:
                super().__setitem__(version, counts)
                thread = threading.Thread(target=lambda: reports.append(learning.report()))
                thread.start()
                thread.join(0.5)  # The report waits for the end of the swap.

        await ask(client, TEXT, ignore_eos=True, max_tokens=8)
        before = learning.report().versions[0]
        assert before.drafts > 0 and learning.versions is not None
        learning.versions._counts = ReportedCounts()
        set_current(folder, 1, "a test")
        await until(lambda: reports)
        assert reports[0].versions == {0: before, 1: VersionCounts()}

    served(test, lambda: pair, learn=str(folder.root), **LEARN)


def test_a_failure_is_cleared_after_recovery(
    pair: LoadedPair, folder: LearnFolder, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_version(folder, pair, root, 1, parent=0)
    monkeypatch.setattr(drafter_versions, "RETRY_SECONDS", 0.05)
    weights = folder.versions / "0001" / "model.safetensors"
    content = weights.read_bytes()

    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        async def failure() -> Any:
            return (await client.get("/v1/peagle/status")).json()["learn"]["failure"]

        folder.current.write_text("{")
        await until(lambda: learning_of(backend).report().version_failure)
        assert "current.json" in await failure()
        folder.current.unlink()
        await until(lambda: learning_of(backend).report().version_failure is None)
        assert await failure() is None
        write_bytes(weights, b"broken")  # like a temporary disk failure
        set_current(folder, 1, "a test")
        await until(lambda: learning_of(backend).report().failed_version == 1)
        # The file is replaced by renaming, because a reader may have mapped it.
        write_bytes(weights, content)
        await until(lambda: learning_of(backend).report().version == 1)
        assert await failure() is None

    served(test, lambda: pair, learn=str(folder.root), **LEARN)


@pytest.mark.parametrize("broken", ["version.json", "events.jsonl", "root"])
def test_broken_files_do_not_affect_serving(
    pair: LoadedPair, folder: LearnFolder, root: Path, broken: str
) -> None:
    add_version(folder, pair, root, 1, parent=0)
    if broken == "version.json":
        (folder.versions / "0001" / broken).write_text("[]")
    elif broken == "events.jsonl":
        folder.events.mkdir()

    async def test(client: httpx.AsyncClient, backend: EngineBackend) -> None:
        if broken == "root":
            shutil.rmtree(folder.root)
        await ask(client, TEXT, ignore_eos=True, max_tokens=8)
        for path in ("/metrics", "/v1/peagle/status", "/v1/peagle/drafter"):
            reply = await client.get(path)
            assert reply.status_code == 200, reply.text

    served(test, lambda: pair, learn=str(folder.root), **LEARN)
