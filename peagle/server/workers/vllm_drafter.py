"""A drafter's folder as vLLM reads it: as it is where it has such a format, else exported into the cache folder, once.

PEAGLE_HOME/vllm/NAME-METHOD-DIGEST: the digest is of the drafter, its target, the dtype and our version, so that what
lies there is never out of date.
"""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from filelock import FileLock

from peagle import __version__
from peagle.catalog.pair import DrafterSource
from peagle.core import Method
from peagle.errors import UserError
from peagle.paths import cache_home
from peagle.server.http.logs import log_event

MASKS = ("mask_token_id", "pard_token", "ptd_token_id")  # a vLLM config that has one is P-EAGLE's
STORED = {"float32": "float32", "float16": "float16"}  # all else: bfloat16


def config_of(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"no drafter in {folder}: its config.json cannot be read ({error})"
        ) from error
    if not isinstance(found, dict):
        raise UserError(f"no drafter in {folder}: its config.json is no object")
    return found


def is_speculators(config: dict[str, Any]) -> bool:
    return "speculators_model_type" in config


def theirs(config: dict[str, Any]) -> bool:
    """vLLM's format or speculators', not ours."""
    return config.get("model_type") == "llama" or is_speculators(config)


def method_of(config: dict[str, Any]) -> Method:
    if not theirs(config):
        return "p-eagle" if config.get("method") == "p-eagle" else "eagle3"
    parallel = config.get("speculators_model_type") == "peagle" or any(
        config.get(key) is not None for key in MASKS
    )
    return "p-eagle" if parallel else "eagle3"


def exported(
    pair: str, method: Method, source: DrafterSource, target: Path, dtype: str, k: int
) -> Path:
    """The folder to give to vLLM."""
    if source.folder is not None and theirs(config_of(source.folder)):
        return source.folder.resolve()
    stored = STORED.get(dtype, "bfloat16")
    name = f"{Path(pair).name}-{method}-{digest(source, target, stored)}"
    folder = cache_home() / "vllm" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{name}.lock"):
        if not (folder / "config.json").is_file():
            log_event("exporting the drafter", folder=str(folder))
            what = str(source.folder) if source.folder is not None else pair
            wanted = [] if source.folder is not None else ["--method", method]
            export(
                what, folder, ["--target", str(target), "--dtype", stored, "-k", str(k), *wanted]
            )
    return folder


def export(what: str, folder: Path, options: list[str]) -> None:
    """In a process of its own: it holds the target, and we live long."""
    command = [
        sys.executable,
        "-m",
        "peagle",
        "export",
        what,
        str(folder),
        "--to",
        "vllm",
        "--json",
        *options,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:] or ["it said nothing"]
        raise UserError(
            f"the drafter {what} could not be exported for vLLM: {last[0].removeprefix('error: ')}"
        )
    if lost := json.loads(done.stdout)["left_out"]:
        log_event(
            "vLLM cannot serve all of the drafter: fewer drafts may be accepted",
            left_out=", ".join(lost),
        )


def digest(source: DrafterSource, target: Path, stored: str) -> str:
    found = hashlib.sha256(json.dumps([__version__, stored, repr(source)]).encode())
    for file in sorted(source.folder.iterdir()) if source.folder is not None else []:
        with file.open("rb") as data:
            found.update(hashlib.file_digest(data, "sha256").digest())
    for file in sorted(target.glob("*.safetensors")):
        told = file.stat()
        found.update(f"{file.resolve()} {told.st_size} {told.st_mtime_ns}".encode())
    return found.hexdigest()[:12]
