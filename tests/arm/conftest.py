"""Fixtures that run the C kernels of each ARM variant under qemu."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from peagle.kernels.cpu import library
from tests.kernels.cpu.test_half_precision import WIDEN
from tests.support.kernels.arm_library import (
    VARIANTS,
    AddressBook,
    ArmLibrary,
    build_runner,
    missing_programs,
)


@pytest.fixture(scope="session")
def arm_runner(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    if missing := missing_programs():
        pytest.fail(f"{', '.join(missing)} not found: install gcc-aarch64-linux-gnu and qemu-user")

    @cache
    def build(variant: str) -> Path:
        return build_runner(variant, tmp_path_factory.mktemp(variant), WIDEN)

    return build


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def emulated(
    variant: str,
    arm_runner: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> ArmLibrary:
    return ArmLibrary(arm_runner(variant), tmp_path, AddressBook(monkeypatch))


@pytest.fixture
def cpu_level(emulated: ArmLibrary, variant: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Replaces the fixture of tests/kernels, so that its tests run on ARM."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library.ctypes, "CDLL", lambda _: emulated)
        loaded = library.Library(Path("emulated"))
    result = library.LoadResult(loaded, f"c, {variant}")
    monkeypatch.setattr(library, "_load_once", lambda: result)
    return variant
