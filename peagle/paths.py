"""Cache and config folders, and atomic writing: files and folders appear complete or not at all."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peagle.errors import UserError

STORED_FILE = "model.gguf"  # the GGUF file in a target's folder, beside its safetensors
TRITON_CACHE_VARIABLE = "TRITON_CACHE_DIR"
CHECKPOINT_FILES = ("config.json", "model.safetensors", "README.md", "curves.png")
DRAFTER_KEY = "draft_vocab_size"  # in the config.json of a drafter, in every format


def cache_home() -> Path:
    """`PEAGLE_HOME`, else `$XDG_CACHE_HOME/peagle`, else `~/.cache/peagle`."""
    if chosen := os.environ.get("PEAGLE_HOME"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "peagle"


def config_home() -> Path:
    """`PEAGLE_CONFIG`, else `$XDG_CONFIG_HOME/peagle`, else `~/.config/peagle`."""
    if chosen := os.environ.get("PEAGLE_CONFIG"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "peagle"


def keep_triton_cache(environment: MutableMapping[str, str]) -> None:
    """Let Triton keep compiled kernels under PEAGLE_HOME, beside everything else that is kept.

    It reads the variable when it compiles. A user who has set it keeps that, and Triton keeps its
    own folder where PEAGLE_HOME cannot be written.
    """
    folder = cache_home() / "triton"
    if TRITON_CACHE_VARIABLE not in environment and is_writable(folder):
        environment[TRITON_CACHE_VARIABLE] = str(folder)


def is_writable(folder: Path) -> bool:
    """Whether files can be written to `folder`, which need not exist yet."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return os.access(existing, os.W_OK) and existing.is_dir()


def checkpoint_folder(path: Path) -> Path:
    """The absolute path, if a checkpoint may be written there: it is new, empty, or a drafter."""
    path = path.expanduser().resolve()
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file: give a folder")
    names = [file.name for file in path.iterdir()] if path.exists() else []
    if foreign := [name for name in names if name not in CHECKPOINT_FILES]:
        raise UserError(
            f"{path} has {foreign[0]!r}, which is not part of a drafter:"
            " give a new or an empty folder"
        )
    if names and not holds_drafter(path):
        raise UserError(f"{path} has other files: give a new or an empty folder")
    return path


def require_drafter_folder(path: Path) -> None:
    """Raise if there is no folder, before anything is read from it."""
    if not path.is_dir():
        reason = "it is a file, give its folder" if path.exists() else "there is no such folder"
        raise UserError(f"no drafter in {path}: {reason}")


def holds_drafter(folder: Path) -> bool:
    """Whether config.json in `folder` is that of a drafter, and not of any other model."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and DRAFTER_KEY in config


@contextmanager
def publish_folder(final: Path, private: bool = False) -> Iterator[Path]:
    """Yield a staging folder that replaces `final` if the block ends without an error.

    `private`: only this user can read it.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
    try:
        yield staging
        if not private:
            staging.chmod(0o755)
            for file in staging.rglob("*"):
                file.chmod(0o755 if file.is_dir() else 0o644)
        replace_folder(staging, final)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def replace_folder(new: Path, final: Path) -> None:
    """Move `new` to `final`. An existing folder is moved aside and restored if the move fails."""
    if not final.exists():
        new.rename(final)
        return
    aside = final.with_name(f".{final.name}.old.{os.getpid()}")
    final.rename(aside)
    try:
        new.rename(final)
    except OSError:
        aside.rename(final)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def save_tensors(
    tensors: dict[str, Any], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Save tensors; raise OSError where safetensors raises its own error, as for a full disk."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata=metadata or {"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"cannot write {path.name}: {error}") from error


def write_json(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_text(path: Path, content: str, executable: bool = False) -> None:
    write_bytes(path, content.encode(), executable)


def write_bytes(path: Path, content: bytes, executable: bool = False) -> None:
    """Write a temporary file beside `path` and rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(content)
    if executable:
        partial.chmod(0o755)
    partial.replace(path)
