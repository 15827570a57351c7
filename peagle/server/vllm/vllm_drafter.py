"""A drafter's folder as vLLM reads it.

A drafter in vLLM's or speculators' format is used as it is. Any other is exported once, into
PEAGLE_HOME/vllm/NAME-METHOD-DIGEST. The digest covers the drafter, its target, the dtype and the
version of this package, so that an exported drafter is never out of date.
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

# A drafter in vLLM's format is P-EAGLE's if its config has one of these keys.
MASK_TOKEN_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
EXPORT_DTYPES = {"float32": "float32", "float16": "float16"}  # for any other dtype: bfloat16


def read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"there is no drafter in {folder}: its config.json cannot be read ({error})"
        ) from error
    if not isinstance(config, dict):
        raise UserError(f"there is no drafter in {folder}: its config.json is not an object")
    return config


def is_speculators(config: dict[str, Any]) -> bool:
    return "speculators_model_type" in config


def is_readable_by_vllm(config: dict[str, Any]) -> bool:
    """Return whether it is in vLLM's or speculators' format."""
    return config.get("model_type") == "llama" or is_speculators(config)


def drafter_method(config: dict[str, Any]) -> Method:
    if not is_readable_by_vllm(config):
        return "p-eagle" if config.get("method") == "p-eagle" else "eagle3"
    has_mask_token = any(config.get(key) is not None for key in MASK_TOKEN_KEYS)
    is_parallel = config.get("speculators_model_type") == "peagle" or has_mask_token
    return "p-eagle" if is_parallel else "eagle3"


def prepare_drafter(
    pair: str, method: Method, source: DrafterSource, target: Path, dtype: str, k: int
) -> Path:
    """Return the folder to give to vLLM; export the drafter if that is needed."""
    if source.folder is not None and is_readable_by_vllm(read_config(source.folder)):
        return source.folder.resolve()
    export_dtype = EXPORT_DTYPES.get(dtype, "bfloat16")
    name = f"{Path(pair).name}-{method}-{digest(source, target, export_dtype)}"
    folder = cache_home() / "vllm" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{name}.lock"):
        if not (folder / "config.json").is_file():
            log_event("exporting the drafter", folder=str(folder))
            options = ["--target", str(target), "--dtype", export_dtype, "-k", str(k)]
            if source.folder is not None:
                export(str(source.folder), folder, options)
            else:
                export(pair, folder, [*options, "--method", method])
    return folder


def export(drafter: str, folder: Path, options: list[str]) -> None:
    """Run `peagle export` in its own process, which frees the target's memory when it ends."""
    command = [sys.executable, "-m", "peagle", "export", drafter, str(folder), "--to", "vllm"]
    result = subprocess.run([*command, "--json", *options], capture_output=True, text=True)
    if result.returncode:
        output = (result.stderr.strip() or result.stdout.strip()).splitlines()
        reason = output[-1].removeprefix("error: ") if output else "there is no output"
        raise UserError(f"the drafter {drafter} could not be exported for vLLM: {reason}")
    if left_out := json.loads(result.stdout)["left_out"]:
        log_event(
            "vLLM cannot serve all of the drafter: fewer drafts may be accepted",
            left_out=", ".join(left_out),
        )


def digest(source: DrafterSource, target: Path, export_dtype: str) -> str:
    """Hash the drafter's files by content and the target's weights by path, size and time."""
    sha = hashlib.sha256(json.dumps([__version__, export_dtype, repr(source)]).encode())
    for file in sorted(source.folder.iterdir()) if source.folder is not None else []:
        with file.open("rb") as data:
            sha.update(hashlib.file_digest(data, "sha256").digest())
    for file in sorted(target.glob("*.safetensors")):
        info = file.stat()
        sha.update(f"{file.resolve()} {info.st_size} {info.st_mtime_ns}".encode())
    return sha.hexdigest()[:12]
