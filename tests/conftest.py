"""Fixtures shared by all tests: tiny random targets, and the real default pair."""

import gc
import os
import ssl
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from peagle.loaded import LoadedPair, load
from peagle.target import Target
from tests.support.built_once import share_between_workers
from tests.support.models.tiny_models import CONFIGS, make_target

# Matrices are tiny and pytest runs several workers, so a second thread would only add overhead.
torch.set_num_threads(1)
gc.disable()  # until all modules are imported: see pytest_collection_finish
# Hypothesis uses the same examples in every run, without a time limit for an example.
settings.register_profile(
    "tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")
# Otherwise every HTTP client would read the certificates again, which takes 20 ms.
ssl.create_default_context = cache(ssl.create_default_context)


# A worker takes one file after another. Short files come last, so that all workers end together.
SHORT_FILES = {"catalog", "cost", "data", "deploy", "doctor", "export", "report", "results"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    root = Path(__file__).parent
    items.sort(key=lambda item: item.path.relative_to(root).parts[0] in SHORT_FILES)


def pytest_collection_finish() -> None:
    """Freeze the objects of all imported modules so that the garbage collector skips them.

    They stay frozen when a server of a test freezes live objects (peagle/engine/gc_tuning.py).
    """
    gc.freeze()
    gc.enable()
    gc.unfreeze = lambda: None


@pytest.fixture(scope="session", autouse=True)
def folder_of_the_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    own = tmp_path_factory.getbasetemp()
    share_between_workers(own.parent if "PYTEST_XDIST_WORKER" in os.environ else own)


# The order of the parameters does not matter: one target is built for all of them.
shared_target = cache(make_target)


@pytest.fixture(scope="session", params=list(CONFIGS))
def any_target(request: pytest.FixtureRequest) -> Target:
    return shared_target(request.param)


@pytest.fixture(scope="session")
def target() -> Target:
    return make_target()


@pytest.fixture
def prompt() -> Callable[[int], list[int]]:
    return lambda n: torch.randint(3, 96, (n,), generator=torch.Generator().manual_seed(n)).tolist()


@pytest.fixture(scope="session")
def real() -> LoadedPair:
    """SmolLM2-135M in float32, downloaded if necessary."""
    return load("smollm2-135m", dtype="float32", device="cpu")
