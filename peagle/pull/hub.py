"""Source "hub": a target or a drafter from the Hugging Face hub.

Interrupted downloads continue with the next call.
"""

import shutil
from pathlib import Path

import httpx
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from huggingface_hub.utils import disable_progress_bars

from peagle.catalog.pair import Pair
from peagle.errors import UserError
from peagle.paths import cache_home
from peagle.progress import FolderProgress, Progress

FILE_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]  # no pickles
TIMEOUT_SECONDS = 20


def fetch(pair: Pair, staging: Path, progress: Progress) -> str:
    assert pair.target.hub is not None
    return download(pair.target.hub, pair.target.revision, f"{pair.name}.hub", staging, progress)


def download(repo: str, revision: str | None, name: str, staging: Path, progress: Progress) -> str:
    """Fill `staging` and return the commit. `name` is the folder that keeps partial downloads."""
    partial = cache_home() / "downloads" / name
    disable_progress_bars()  # `progress` reports instead
    try:
        info = HfApi().model_info(
            repo, revision=revision, files_metadata=True, timeout=TIMEOUT_SECONDS
        )
        total = sum(
            file.size or 0
            for file in info.siblings or []
            if any(Path(file.rfilename).match(pattern) for pattern in FILE_PATTERNS)
        )
        with FolderProgress(partial, f"{repo} from the hub", total, progress):
            snapshot_download(
                repo, revision=info.sha, local_dir=partial, allow_patterns=FILE_PATTERNS
            )
    except (httpx.HTTPError, HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"{repo} cannot be downloaded from the hub ({reason}):"
            " check the connection or HF_ENDPOINT"
        ) from error
    shutil.rmtree(partial / ".cache", ignore_errors=True)
    for file in partial.iterdir():
        shutil.move(file, staging / file.name)
    partial.rmdir()
    return str(info.sha)
