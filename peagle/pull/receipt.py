"""The receipt of a pulled folder, peagle.json: its source and the size of every file."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from peagle.paths import STORED_FILE, write_json

RECEIPT = "peagle.json"


@dataclass(frozen=True, slots=True)
class Receipt:
    source: str  # "hub" or "wheels"
    revision: str
    files: dict[str, int]  # path in the folder -> bytes
    hub: str | None = None  # hub id of a drafter; None for a target


def receipt(folder: Path) -> Receipt | None:
    """The receipt of `folder`; None if there is none or if a file is missing or truncated."""
    try:
        content = json.loads((folder / RECEIPT).read_text())
        complete = all(
            (folder / name).stat().st_size == size for name, size in content["files"].items()
        )
        parsed = Receipt(**content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return parsed if complete else None


def has_stored(origin: Receipt | None) -> bool:
    """Whether the safetensors of a folder were converted from the GGUF file beside them."""
    return origin is not None and origin.source == "wheels" and STORED_FILE in origin.files


def write_receipt(folder: Path, source: str, revision: str, hub: str | None = None) -> None:
    files = {str(f.relative_to(folder)): f.stat().st_size for f in folder.rglob("*") if f.is_file()}
    content = asdict(Receipt(source, revision, files, hub))
    if hub is None:
        del content["hub"]
    write_json(folder / RECEIPT, content)
