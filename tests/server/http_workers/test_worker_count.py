"""The default of --http-workers follows the device and the number of cores."""

import os
from pathlib import Path

import pytest

from peagle import machine
from peagle.server.http_workers import worker_count


@pytest.mark.parametrize(
    ("cores", "device", "engine", "expected"),
    [
        (16, "auto", "native", 4),
        (64, "cuda:1", "native", 4),
        (8, "cuda", "native", 2),
        (2, "auto", "native", 1),
        (16, "cpu", "native", 1),
        (16, "auto", "vllm", 1),
    ],
)
def test_default_with_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    cores: int,
    device: str,
    engine: str,
    expected: int,
) -> None:
    set_machine(monkeypatch, tmp_path, cores)
    assert worker_count.default_http_workers(device, engine) == expected


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000\n", 4), ("800000 100000\n", 2), ("50000 100000\n", 1), ("unknown", 4)],
)
def test_default_with_a_cpu_quota(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quota: str, expected: int
) -> None:
    set_machine(monkeypatch, tmp_path, 16)
    (tmp_path / "cpu.max").write_text(quota)
    assert worker_count.default_http_workers("auto", "native") == expected


@pytest.mark.parametrize(("visible", "expected"), [("", 1), ("-1", 1), ("0", 4)])
def test_default_with_hidden_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: str, expected: int
) -> None:
    set_machine(monkeypatch, tmp_path, 16)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert worker_count.default_http_workers("auto", "native") == expected


def set_machine(monkeypatch: pytest.MonkeyPatch, folder: Path, cores: int) -> None:
    """A machine with a GPU and without a CPU quota."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine, "GPU_FILES", (folder,))
    monkeypatch.setattr(machine, "CPU_QUOTA", folder / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))


def test_default_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "GPU_FILES", (tmp_path / "missing",))
    assert worker_count.default_http_workers("auto", "native") == 1
