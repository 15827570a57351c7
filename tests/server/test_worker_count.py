"""The default of --http-workers follows the device and the number of cores."""

import os
from pathlib import Path

import pytest

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
def test_beside_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    cores: int,
    device: str,
    engine: str,
    expected: int,
) -> None:
    monkeypatch.setattr(worker_count, "NVIDIA_DEVICE", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert worker_count.default_http_workers(device, engine) == expected


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(worker_count, "NVIDIA_DEVICE", tmp_path / "missing")
    assert worker_count.default_http_workers("auto", "native") == 1
