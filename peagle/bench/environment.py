"""Where a run is measured (versions, processor, GPU), and which weights it uses."""

import hashlib
import platform
import subprocess
from pathlib import Path
from typing import Any

import peagle
from peagle.catalog.catalog import is_gguf_file
from peagle.machine import available_cores, cpu_name

COMMAND_TIMEOUT = 20  # seconds
SAMPLE_BYTES = 1 << 16
SAMPLE_COUNT = 16


def describe_environment(device: Any = None) -> dict[str, Any]:
    """`device` is torch's; None where the work is done elsewhere, by an endpoint."""
    import torch
    import transformers

    gpu = device is not None and device.type == "cuda"
    return {
        "peagle": peagle.__version__,
        "commit": git_commit(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cores": available_cores(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if gpu else None,
        "cuda": torch.version.cuda if gpu else None,
        "driver": gpu_driver() if gpu else None,
    }


def git_commit() -> str | None:
    """The commit of the checkout this package runs from, with `+` if files have changed.

    None for an installed package.
    """
    folder = Path(peagle.__file__).parent.parent
    if not (folder / ".git").exists():
        return None
    head = run_command("git", "-C", str(folder), "rev-parse", "--short=10", "HEAD")
    changes = run_command("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no")
    return f"{head}{'+' if changes else ''}" if head else None


def gpu_driver() -> str | None:
    versions = run_command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return versions.splitlines()[0].strip() if versions else None


def run_command(*command: str) -> str | None:
    """The standard output of a command; None if it fails."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def describe_target(target: Any) -> dict[str, Any]:
    """The dtype is that of the activations; `weights`: how the matrices are kept."""
    dtype = str(target.dtype).removeprefix("torch.")
    return {
        "name": public_name(target.name),
        "revision": target.revision,
        "dtype": dtype,
        "weights": target.stored_format or target.format or dtype,
        "sha": target_digest(target),
    }


def describe_drafter(loaded: Any, method: Any) -> dict[str, Any]:
    """A drafter that was never saved has no checksum."""
    config = loaded.drafter(method).config
    source = loaded.pair.drafters.get(method)
    folder = source.folder if source is not None else None
    name = method if config.trained else f"untrained {method}"
    return {
        "name": folder.name if folder is not None else name,
        "sha": folder_digest(folder) if folder is not None else None,
        "trained": config.trained,
        "layers": config.num_layers,
        "k_trained": config.k_trained,
    }


def public_name(name: str) -> str:
    """The name of a folder or GGUF file without its path, which is private to this machine."""
    path = Path(name).expanduser()
    return path.name if path.is_dir() or is_gguf_file(path) else name


def target_digest(target: Any) -> str | None:
    """A digest of the weights that run: of the GGUF file, or of those in the folder."""
    named = Path(target.name).expanduser()
    file = target.gguf.path if target.gguf is not None else named if is_gguf_file(named) else None
    if file is not None:
        return gguf_digest(file)
    return folder_digest(target.folder) if target.folder is not None else None


def folder_digest(folder: Path) -> str | None:
    """A digest of the config and samples of the weights, the same on every machine."""
    digest = hashlib.sha256()
    try:
        digest.update((folder / "config.json").read_bytes())
        for path in sorted(folder.glob("*.safetensors")):
            digest.update(safetensors_samples(path))
    except OSError:
        return None
    return digest.hexdigest()[:12]


def safetensors_samples(path: Path) -> bytes:
    """The header of a safetensors file, its size, and samples of its data."""
    with path.open("rb") as file:
        start = file.read(8)
        header_bytes = int.from_bytes(start, "little")
        header = file.read(header_bytes)
    return b"".join([start, header, *weight_samples(path, 8 + header_bytes)])


def gguf_digest(path: Path) -> str:
    """A digest of the header of a GGUF file, its size, and samples of its data."""
    from peagle.target.gguf.header import read_header

    header = read_header(path)
    data_start = min((info.start for info in header.tensors.values()), default=0)
    content = b"".join([header.digest.encode(), *weight_samples(path, data_start)])
    return hashlib.sha256(content).hexdigest()[:12]


def weight_samples(path: Path, data_start: int) -> list[bytes]:
    """The size of a file, and 64 KiB at 16 places of its data."""
    size = path.stat().st_size
    parts = [str(size).encode()]
    last_sample = max(0, size - data_start - SAMPLE_BYTES)
    with path.open("rb") as file:
        for i in range(SAMPLE_COUNT):
            file.seek(data_start + last_sample * i // (SAMPLE_COUNT - 1))
            parts.append(file.read(SAMPLE_BYTES))
    return parts
