"""The CUDA context is created early only for a torch that uses it, and no device name fails."""

from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

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
    preload.load_libraries(device)
    assert created == expected


def test_a_device_without_a_number_is_left_to_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    contexts(monkeypatch, tmp_path, has_cuda=True)
    monkeypatch.setattr(preload, "create_context", lambda device: int(device.partition(":")[2]))
    preload.load_libraries("cuda:x")


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
