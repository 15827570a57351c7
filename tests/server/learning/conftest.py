"""Fixtures: a tiny pair, a learning folder, and short polling intervals."""

from pathlib import Path

import pytest

from peagle.learn.folder import LearnFolder
from peagle.loaded import LoadedPair
from peagle.server.worker import drafter_versions
from tests.support.models.versions import load_folder
from tests.support.server.serving import tiny_folder


@pytest.fixture(scope="package")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def pair(root: Path) -> LoadedPair:
    return load_folder(root)


@pytest.fixture
def folder(tmp_path: Path) -> LearnFolder:
    return LearnFolder(tmp_path / "learn")


@pytest.fixture(autouse=True)
def fast_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter_versions, "POLL_SECONDS", 0.02)
