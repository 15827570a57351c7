"""Where a run was measured: versions, processor, GPU; and which weights."""

import hashlib
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import peagle
from peagle.machine import cpu_name


def environment(device: Any = None) -> dict[str, Any]:
    """`device`: torch's; None: the work is done elsewhere, behind an endpoint."""
    import torch
    import transformers

    gpu = device is not None and device.type == "cuda"
    return {
        "peagle": peagle.__version__,
        "commit": commit(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if gpu else None,
        "cuda": torch.version.cuda if gpu else None,
        "driver": driver() if gpu else None,
    }


def commit() -> str | None:
    """Of the checkout this package runs from, `+` if it was changed; None for an installed one."""
    folder = Path(peagle.__file__).parent.parent
    if not (folder / ".git").exists():
        return None
    head = told("git", "-C", str(folder), "rev-parse", "--short=10", "HEAD")
    changed = told("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no")
    return f"{head}{'+' if changed else ''}" if head else None


def driver() -> str | None:
    found = told("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found.splitlines()[0].strip() if found else None


def told(*command: str) -> str | None:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def target_of(target: Any) -> dict[str, Any]:
    return {
        "name": named(target.name),
        "revision": target.revision,
        "dtype": str(target.dtype).removeprefix("torch."),
        "sha": folder_digest(target.folder) if target.folder is not None else None,
    }


def drafter_of(loaded: Any, method: Any) -> dict[str, Any]:
    """`loaded.pair` says where it comes from; a drafter that was only in memory has no checksum."""
    config, source = loaded.drafter(method).config, loaded.pair.drafters.get(method)
    folder = source.folder if source is not None else None
    return {
        "name": folder.name
        if folder is not None
        else f"untrained {method}"
        if not config.trained
        else method,
        "sha": folder_digest(folder) if folder is not None else None,
        "trained": config.trained,
        "layers": config.num_layers,
        "k_trained": config.k_trained,
    }


def named(name: str) -> str:
    """A folder's own name: where it lies is nobody's business."""
    path = Path(name).expanduser()
    return path.name if path.is_dir() else name


def folder_digest(folder: Path) -> str | None:
    """Of the config and samples of the weights: the same target has the same, whoever holds it."""
    digest = hashlib.sha256()
    try:
        digest.update((folder / "config.json").read_bytes())
        for path in sorted(folder.glob("*.safetensors")):
            digest.update(samples(path))
    except OSError:
        return None
    return digest.hexdigest()[:12]


def samples(path: Path) -> bytes:
    """A safetensors file's header, its size, and 64 KiB at 16 places of its data."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        parts = [start, file.read(length), str(size).encode()]
        for i in range(16):
            file.seek(8 + length + max(0, size - 8 - length - (1 << 16)) * i // 15)
            parts.append(file.read(1 << 16))
    return b"".join(parts)
