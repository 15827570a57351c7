"""Preloading: the CUDA context is created early only if torch uses it; any device name works."""

import sys
import threading
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from peagle import machine
from peagle.target import preload


@pytest.mark.parametrize(
    ("has_cuda", "device", "expected"),
    [
        (True, "auto", ["auto"]),
        (True, "cuda:1", ["cuda:1"]),
        (True, "cpu", []),
        (False, "auto", []),
    ],
)
def test_contexts(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    has_cuda: bool,
    device: str,
    expected: list[str],
) -> None:
    created = contexts(monkeypatch, tmp_path, has_cuda)
    preload.load_libraries(device, threading.Event())
    assert created == expected


def test_invalid_devices_are_left_to_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    contexts(monkeypatch, tmp_path, has_cuda=True)
    monkeypatch.setattr(preload, "create_context", lambda device: int(device.partition(":")[2]))
    preload.load_libraries("cuda:x", threading.Event())


def contexts(monkeypatch: pytest.MonkeyPatch, folder: Path, has_cuda: bool) -> list[str]:
    """Let torch be a folder without libraries, and return the devices that get a context."""
    (folder / "lib").mkdir()
    if has_cuda:
        (folder / "lib" / "libtorch_cuda.so").touch()
    spec = ModuleSpec("torch", None, origin=str(folder / "__init__.py"))
    created: list[str] = []
    monkeypatch.setattr(preload, "find_spec", lambda name: spec)
    monkeypatch.setattr(preload, "create_context", created.append)
    return created


@pytest.mark.parametrize(
    ("has_cuda", "has_driver", "device", "visible", "expected"),
    [
        (True, True, "auto", "0", True),
        (True, True, "cuda:1", "0,1", True),
        (True, True, "cpu", "0", False),
        (True, False, "auto", "0", False),
        (False, True, "auto", "0", False),
        (True, True, "auto", "", False),
        (True, True, "auto", "-1", False),
    ],
)
def test_kernels_are_compiled_early_only_for_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    has_cuda: bool,
    has_driver: bool,
    device: str,
    visible: str,
    expected: bool,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    contexts(monkeypatch, tmp_path, has_cuda)
    driver = tmp_path / "nvidiactl"
    if has_driver:
        driver.touch()
    monkeypatch.setattr(machine, "GPU_FILES", (driver,))
    monkeypatch.setattr(preload, "LATER_MODULES", ())
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    started: list[str] = []
    loading = threading.Event()
    monkeypatch.setattr(preload, "start_compile_processes", lambda: started.append("processes"))
    monkeypatch.setattr(preload, "hash_compiler", lambda: started.append("hash"))
    monkeypatch.setattr(preload, "load_libraries", lambda *_: loading.wait(60))
    preload.preload(device)
    loading.set()
    assert started == (["processes", "hash"] if expected else [])


def test_the_compiler_is_not_hashed_when_torch_can_be_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The event is set even if loading libraries fails, as here."""
    contexts(monkeypatch, tmp_path, has_cuda=True)
    loaded = threading.Event()
    preload.load_libraries("auto", loaded)
    assert loaded.is_set()
